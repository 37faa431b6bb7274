// Files as a message carries them: images as data: URLs, text files and the text of PDF files as text.
import { readPdf } from "./pdf.js";

const MAX_TEXT_BYTES = 512 * 1024; // more than most contexts hold
const MAX_PDF_BYTES = 64 * 1024 * 1024;
const MAX_IMAGE_BYTES = 20 * 1024 * 1024;
const MAX_IMAGES_BYTES = 44 * 1024 * 1024; // of a message; the server takes a body of 64 MiB
const IMAGE = /^image\/(jpeg|png|webp|gif|bmp)$/;

/** { kind: "image", name, url } or { kind: "file", name, text, pages? }. Throws an Error in words for people. */
export async function readAttachment(file, { sees, others }) {
  if (IMAGE.test(file.type)) return { kind: "image", name: file.name, url: await imageUrl(file, sees, others) };
  if (file.type === "application/pdf" || /\.pdf$/i.test(file.name)) {
    if (file.size > MAX_PDF_BYTES) throw new Error(tooLarge(file.name, file.size, "64 MiB"));
    const { text, pages } = await readPdf(file);
    const { length } = new TextEncoder().encode(text);
    if (length > MAX_TEXT_BYTES) throw new Error(tooLarge(`The text of ${file.name}`, length, "512 KiB"));
    return { kind: "file", name: file.name, text, pages };
  }
  return { kind: "file", name: file.name, text: await textOf(file) };
}

/** A file as fenced code; the fence is longer than any in it. */
export function fenced({ name, text }) {
  const longest = (text.match(/`+/g) ?? []).reduce((most, run) => Math.max(most, run.length), 2);
  const fence = "`".repeat(longest + 1);
  const extension = /\.(\w{1,12})$/.exec(name)?.[1] ?? "";
  const language = /^pdf$/i.test(extension) ? "" : extension;
  return `${name}:\n\n${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** What a chip says about a file: its pages or its size. */
export function sizeOf({ text, pages }) {
  if (pages) return pages === 1 ? "1 page" : `${pages} pages`;
  const { length } = new TextEncoder().encode(text);
  return length < 1024 ? `${length} B` : `${Math.round(length / 1024)} KiB`;
}

async function imageUrl(file, sees, others) {
  if (!sees) throw new Error(`${file.name} is an image, and this model reads only text.`);
  const size = others.reduce((sum, { url = "" }) => sum + url.length, 0) + (file.size * 4) / 3;
  if (file.size > MAX_IMAGE_BYTES) throw new Error(tooLarge(file.name, file.size, "20 MiB"));
  if (size > MAX_IMAGES_BYTES * (4 / 3)) throw new Error(`${file.name} was not attached: the images of a message may take up to 44 MiB.`);
  return dataUrl(file);
}

function tooLarge(what, bytes, limit) {
  const size = bytes < 1048576 ? `${Math.ceil(bytes / 1024)} KiB` : `${Math.ceil(bytes / 1048576)} MiB`;
  return `${what} is too large (${size}). The limit is ${limit}.`;
}

/** The file as a data: URL, as the server takes images. */
function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error(`${file.name} cannot be read.`)));
    reader.readAsDataURL(file);
  });
}

async function textOf(file) {
  if (file.size > MAX_TEXT_BYTES) throw new Error(tooLarge(file.name, file.size, "512 KiB"));
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    // told below
  }
  throw new Error(`${file.name} is not a UTF-8 text file.`);
}
