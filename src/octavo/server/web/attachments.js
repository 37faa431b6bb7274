// Files as a message carries them: images, videos and PDF files to see as data: URLs; text files and the text of PDF files as text.
import { readPdf } from "./pdf.js";

const MAX_TEXT_BYTES = 512 * 1024; // more than most contexts hold
const MAX_PDF_BYTES = 64 * 1024 * 1024;
const MAX_IMAGE_BYTES = 20 * 1024 * 1024;
const MAX_SEEN_BYTES = 44 * 1024 * 1024; // of a message; the server takes a body of 64 MiB
const IMAGE = /^image\/(jpeg|png|webp|gif|bmp)$/;
const VIDEOS = { mp4: "video/mp4", m4v: "video/mp4", mov: "video/quicktime", webm: "video/webm" };

/**
 * { kind: "image" | "video", name, url }, { kind: "file", name, text, pages? }, or for a model that sees
 * { kind: "pdf", name, url, pages, text, as }, whose text is null if it has none that fits. pdfAs: "pages" or "text", what
 * the server does by itself. Throws an Error in words for people.
 */
export async function readAttachment(file, { sees, pdfAs, others }) {
  const { name } = file;
  const extension = /\.(\w+)$/.exec(name)?.[1].toLowerCase();
  if (IMAGE.test(file.type)) return { kind: "image", name, url: await imageUrl(file, sees, others) };
  const video = VIDEOS[extension] ?? Object.values(VIDEOS).find((type) => type === file.type);
  if (video) return { kind: "video", name, url: await seenUrl(file, "a video", video, sees, others) };
  if (file.type === "application/pdf" || extension === "pdf") return readDocument(file, { sees, pdfAs, others });
  return { kind: "file", name, text: await textOf(file) };
}

async function readDocument(file, { sees, pdfAs, others }) {
  const { name } = file;
  if (file.size > MAX_PDF_BYTES) throw new Error(tooLarge(name, file.size, "64 MiB"));
  const { text, pages } = await readPdf(file);
  const { length } = new TextEncoder().encode(text);
  if (!sees) {
    if (!text) throw new Error(`${name} contains no text. It may be a scan.`);
    if (length > MAX_TEXT_BYTES) throw new Error(tooLarge(`The text of ${name}`, length, "512 KiB"));
    return { kind: "file", name, text, pages };
  }
  const url = await seenUrl(file, "a document", "application/pdf", sees, others);
  const read = text && length <= MAX_TEXT_BYTES ? text : null;
  return { kind: "pdf", name, url, pages, text: read, as: read === null ? "pages" : pdfAs };
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
export function sizeOf({ text, url, pages }) {
  if (pages) return pages === 1 ? "1 page" : `${pages} pages`;
  const length = url ? bytesOf(url) : new TextEncoder().encode(text).length;
  if (length < 1024) return `${length} B`;
  return length < 1048576 ? `${Math.round(length / 1024)} KiB` : `${Math.round(length / 1048576)} MiB`;
}

/** The part of a message that carries a file to see. */
export function partOf({ name, url }) {
  if (url.startsWith("data:image/")) return { type: "image_url", image_url: { url } };
  if (url.startsWith("data:video/")) return { type: "input_video", input_video: { url } };
  return { type: "file", file: { filename: name, file_data: url }, pdf_as: "pages" };
}

async function imageUrl(file, sees, others) {
  if (sees && file.size > MAX_IMAGE_BYTES) throw new Error(tooLarge(file.name, file.size, "20 MiB"));
  return seenUrl(file, "an image", file.type, sees, others);
}

/** The file as a data: URL of this type, as the server takes it. */
async function seenUrl(file, what, type, sees, others) {
  if (!sees) throw new Error(`${file.name} is ${what}, but this model reads only text.`);
  const size = others.reduce((sum, { url }) => sum + (url ? bytesOf(url) : 0), file.size);
  if (size > MAX_SEEN_BYTES) {
    throw new Error(`${file.name} was not attached: the images, documents and videos in a message may take at most 44 MiB.`);
  }
  const url = await dataUrl(file);
  return `data:${type};base64,${url.slice(url.indexOf(",") + 1)}`;
}

/** The size of the file in a data: URL. */
function bytesOf(url) {
  return Math.floor(((url.length - url.indexOf(",") - 1) * 3) / 4);
}

function tooLarge(what, bytes, limit) {
  const size = bytes < 1048576 ? `${Math.ceil(bytes / 1024)} KiB` : `${Math.ceil(bytes / 1048576)} MiB`;
  return `${what} is too large (${size}). The limit is ${limit}.`;
}

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
