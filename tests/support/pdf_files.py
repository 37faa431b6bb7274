"""Minimal PDF files with a text layer."""

from __future__ import annotations

from collections.abc import Sequence


def text_pdf(pages: Sequence[str]) -> bytes:
    """Make a file with these lines of ASCII text on its pages; "" leaves a page empty."""
    numbers = [4 + 2 * i for i in range(len(pages))]  # of the pages' objects, each before its content
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {len(pages)} /Kids [{' '.join(f'{number} 0 R' for number in numbers)}] >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in zip(numbers, pages, strict=True):
        lines = text.splitlines()
        width, height = 40 + 8 * max(map(len, lines), default=0), 40 + 14 * len(lines)
        shown = " ".join(f"0 -14 Td ({line}) Tj" for line in lines)
        content = f"BT /F1 12 Tf 20 {height - 10} Td {shown} ET" if lines else ""
        resources = f"/Resources << /Font << /F1 3 0 R >> >> /MediaBox [0 0 {width} {height}]"
        objects.append(f"<< /Type /Page /Parent 2 0 R {resources} /Contents {number + 1} 0 R >>")
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    body, offsets = "%PDF-1.4\n", []
    for number, item in enumerate(objects, start=1):
        offsets.append(len(body))
        body += f"{number} 0 obj\n{item}\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    end = f"trailer << /Size {size} /Root 1 0 R >>\nstartxref\n{len(body)}\n%%EOF\n"
    return f"{body}xref\n0 {size}\n0000000000 65535 f \n{table}{end}".encode("ascii")
