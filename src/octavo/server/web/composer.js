// The field that messages are written in: drafts that survive a reload, and attached files as chips.
import { readAttachment, sizeOf } from "./attachments.js";
import { byId, element, icon } from "./dom.js";
import { loadDraft, saveDraft } from "./store.js";

export class Composer {
  #area = byId("prompt");
  #problem = byId("problem");
  #conversationId = "";
  #chips = byId("chips");
  #attachments = []; // as `readAttachment` returns them, or { kind: "reading", name }
  #kept = new Map(); // by conversation: attachments that were not sent
  #sees = false;
  #pdfAs = "pages";

  constructor() {
    this.#area.addEventListener("input", () => this.#changed());
    byId("attach").addEventListener("click", () => byId("files").click());
    byId("files").addEventListener("change", (event) => {
      const files = [...event.target.files];
      event.target.value = "";
      this.#attach(files);
    });
    this.#area.addEventListener("paste", (event) => this.#took(event, event.clipboardData));
    const form = byId("composer");
    form.addEventListener("dragover", (event) => event.preventDefault());
    form.addEventListener("drop", (event) => {
      event.preventDefault(); // a browser would leave the page for the file
      this.#took(event, event.dataTransfer);
    });
  }

  /** sees: whether the chosen model does: only then can images and videos be attached. pdfAs: see `readAttachment`. */
  fit({ sees, pdfAs }) {
    this.#sees = sees;
    this.#pdfAs = pdfAs;
    const label = sees ? "Attach images, PDFs, videos or text files" : "Attach PDFs or text files";
    byId("attach").title = label;
    byId("attach").setAttribute("aria-label", label);
  }

  /** { images: [{ name, url }], media: [{ name, url, pages?, text? }], files: [{ name, text, pages? }] } of the message. */
  get attachments() {
    const found = { images: [], media: [], files: [] };
    for (const { kind, name, url, text, pages, as } of this.#attachments) {
      if (kind === "image") found.images.push({ name, url });
      else if (kind === "video") found.media.push({ name, url });
      else if (kind === "pdf" && as === "pages") found.media.push({ name, url, pages, text });
      else found.files.push({ name, text, ...(pages && { pages }) });
    }
    return found;
  }

  /** Attaches what another message has. */
  take({ images = [], media = [], files = [] }) {
    const seen = (one) => (one.pages ? { kind: "pdf", as: "pages", ...one } : { kind: "video", ...one });
    const ofKind = (kind) => (one) => ({ kind, ...one });
    this.#attachments = [...images.map(ofKind("image")), ...media.map(seen), ...files.map(ofKind("file"))];
    this.#showChips();
  }

  /** Whether a file is still being read. */
  get isReading() {
    return this.#attachments.some(({ kind }) => kind === "reading");
  }

  /** Whether there is nothing to send, or not yet. */
  get isEmpty() {
    return this.isReading || (!this.text && !this.#attachments.length);
  }

  get text() {
    return this.#area.value.trim();
  }

  /** Shows the draft of a conversation; "" for one that has not begun. */
  open(id) {
    if (id !== this.#conversationId) {
      this.#kept.set(this.#conversationId, this.#attachments);
      this.#attachments = this.#kept.get(id) ?? [];
      this.#showChips();
    }
    this.#conversationId = id;
    this.#set(loadDraft(id));
  }

  clear() {
    this.#attachments = [];
    this.#showChips();
    this.#set("");
    saveDraft(this.#conversationId, "");
  }

  /** Explains why nothing was sent; null clears the explanation. */
  tell(problem) {
    this.#problem.hidden = !problem;
    this.#problem.textContent = problem ?? "";
  }

  resize() {
    this.#area.style.height = "auto";
    this.#area.style.height = `${this.#area.scrollHeight}px`;
    byId("send").disabled = this.isEmpty;
  }

  #set(text) {
    this.#area.value = text;
    this.tell(null);
    this.resize();
  }

  #changed() {
    saveDraft(this.#conversationId, this.#area.value);
    this.tell(null);
    this.resize();
  }

  /** Attaches the files that were pasted or dropped, if any. */
  #took(event, data) {
    const files = [...(data?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    this.#attach(files);
  }

  #showChips() {
    this.#chips.hidden = !this.#attachments.length;
    this.#chips.replaceChildren(...this.#attachments.map((attachment) => this.#chip(attachment)));
    byId("send").disabled = this.isEmpty;
  }

  #chip(attachment) {
    const { kind, name, url } = attachment;
    const picture = kind === "image" ? element("img", { src: url, alt: "" }) : icon("file");
    const texts = [element("span", { className: "chip-name", title: name }, name)];
    if (kind === "reading") texts.push(element("span", { className: "chip-size" }, "Reading…"));
    if (["file", "video", "pdf"].includes(kind)) texts.push(element("span", { className: "chip-size" }, sizeOf(attachment)));
    if (kind === "pdf" && attachment.text !== null) texts.push(pdfSwitch(attachment));
    const remove = element("button", { type: "button", className: "icon-button" }, icon("close"));
    remove.setAttribute("aria-label", `Remove ${name}`);
    remove.addEventListener("click", () => {
      this.#attachments = this.#attachments.filter((other) => other !== attachment);
      this.#showChips();
      this.#area.focus();
    });
    return element("li", { className: "chip" }, picture, ...texts, remove);
  }

  async #attach(files) {
    const id = this.#conversationId;
    const problems = [];
    for (const file of files) {
      const reading = { kind: "reading", name: file.name };
      const others = [...this.#attachments];
      this.#attachments = [...this.#attachments, reading];
      this.#showChips();
      let read = [];
      try {
        read = [await readAttachment(file, { sees: this.#sees, pdfAs: this.#pdfAs, others })];
      } catch (error) {
        problems.push(error.message);
      }
      // It may have been removed, or another conversation opened, while it was read.
      const settle = (list) => list.flatMap((other) => (other === reading ? read : [other]));
      if (id === this.#conversationId) this.#attachments = settle(this.#attachments);
      else this.#kept.set(id, settle(this.#kept.get(id) ?? []));
      this.#showChips();
    }
    if (id !== this.#conversationId) return;
    this.tell(problems.join(" ") || null);
    this.#area.focus();
  }
}

/** The choice between the pages and the text of a document. */
function pdfSwitch(attachment) {
  const options = ["pages", "text"].map((as) => element("option", { value: as }, `as ${as}`));
  const choice = element("select", { className: "chip-switch" }, ...options);
  choice.setAttribute("aria-label", `Send ${attachment.name}`);
  choice.value = attachment.as;
  choice.addEventListener("change", () => {
    attachment.as = choice.value;
  });
  return choice;
}
