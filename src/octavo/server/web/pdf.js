// The text of PDF files, by pdf.js, which is loaded with the first one.

/** { text, pages }; the text of a scan is "". Throws an Error, in words for people, for a file with a password or damage. */
export async function readPdf(file) {
  const pdfjs = await import("./vendor/pdf.mjs");
  pdfjs.GlobalWorkerOptions.workerSrc = "/web/vendor/pdf.worker.mjs";
  const task = pdfjs.getDocument({
    data: await file.arrayBuffer(),
    disableFontFace: true, // nothing is drawn
    isEvalSupported: false,
    useWasm: false,
    verbosity: pdfjs.VerbosityLevel.ERRORS,
  });
  try {
    const document = await task.promise;
    const pages = [];
    for (let number = 1; number <= document.numPages; number++) {
      const page = await document.getPage(number);
      const { items } = await page.getTextContent();
      pages.push(items.map(({ str, hasEOL }) => `${str ?? ""}${hasEOL ? "\n" : ""}`).join("").trim());
      page.cleanup();
    }
    return { text: pages.filter(Boolean).join("\n\n"), pages: pages.length };
  } catch (error) {
    if (error.name === "PasswordException") throw new Error(`${file.name} is password-protected.`, { cause: error });
    throw new Error(`${file.name} is not a readable PDF file.`, { cause: error });
  } finally {
    await task.destroy();
  }
}
