"""Text that a client keeps for the server without showing it: reasoning, and summaries of conversations.

It is encoded but not encrypted, because clients are allowed to read it. Therefore any Octavo server can read text that
another one has sealed.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "octavo."


def seal(text: str) -> str:
    """Encode text for fields that other products encrypt."""
    return _MARK + base64.urlsafe_b64encode(text.encode()).decode()


def unseal(sealed: str | None) -> str | None:
    """Return the text that was given to `seal`, or None if there is none or another product has sealed it."""
    if sealed is None or not sealed.startswith(_MARK):
        return None
    try:
        return base64.b64decode(sealed[len(_MARK) :], altchars="-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
