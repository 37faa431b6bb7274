// The field that messages are written in: drafts that survive a reload, files that are attached as text, and images.
import { byId, element, icon } from "./dom.js";
import { loadDraft, saveDraft } from "./store.js";

const MAX_FILE_BYTES = 256 * 1024; // more than a context holds
const MAX_IMAGE_BYTES = 20 * 1024 * 1024;
const MAX_IMAGES_BYTES = 44 * 1024 * 1024; // of a message; the server takes a body of 64 MiB
const IMAGE = /^image\/(jpeg|png|webp|gif|bmp)$/;

export class Composer {
  #area = byId("prompt");
  #problem = byId("problem");
  #conversationId = "";
  #previews = byId("previews");
  #images = []; // { name, url }
  #sees = false;

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

  /** Whether the chosen model sees: only then can images be attached. */
  set sees(sees) {
    this.#sees = sees;
    const label = sees ? "Attach images or text files" : "Attach text files";
    byId("attach").title = label;
    byId("attach").setAttribute("aria-label", label);
  }

  /** The images of the message: { name, url }, url with the data of the file. */
  get images() {
    return [...this.#images];
  }

  /** Shows these images as those of the message. */
  take(images) {
    this.#images = [...(images ?? [])];
    this.#showImages();
  }

  get isEmpty() {
    return !this.text && !this.#images.length;
  }

  get text() {
    return this.#area.value.trim();
  }

  /** Shows the draft of a conversation; "" for one that has not begun. */
  open(id) {
    if (id !== this.#conversationId) this.take([]);
    this.#conversationId = id;
    this.#set(loadDraft(id));
  }

  clear() {
    this.take([]);
    this.#set("");
    saveDraft(this.#conversationId, "");
  }

  /** Says why nothing was sent, or takes it back. */
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

  /** Attaches the files that were pasted or dropped, if there are some. */
  #took(event, data) {
    const files = [...(data?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    this.#attach(files);
  }

  #showImages() {
    this.#previews.hidden = !this.#images.length;
    this.#previews.replaceChildren(
      ...this.#images.map((image, index) => {
        const remove = element("button", { type: "button", className: "icon-button" }, icon("close"));
        remove.setAttribute("aria-label", `Remove ${image.name}`);
        remove.addEventListener("click", () => {
          this.#images.splice(index, 1);
          this.#showImages();
        });
        return element("li", {}, element("img", { src: image.url, alt: image.name }), remove);
      }),
    );
    byId("send").disabled = this.isEmpty;
  }

  async #attachImage(file, id) {
    if (!this.#sees) throw new Error(`${file.name} is an image, and this model reads text only.`);
    const size = this.#images.reduce((sum, image) => sum + image.url.length, 0) + (file.size * 4) / 3;
    if (file.size > MAX_IMAGE_BYTES || size > MAX_IMAGES_BYTES * (4 / 3)) {
      throw new Error(`${file.name} has ${Math.ceil(file.size / 1048576)} MiB; an image has at most 20, a message 44.`);
    }
    const url = await dataUrl(file);
    if (id !== this.#conversationId) return; // another conversation was opened meanwhile
    this.#images.push({ name: file.name, url });
    this.#showImages();
  }

  async #attach(files) {
    const id = this.#conversationId;
    const problems = [];
    for (const file of files) {
      try {
        if (IMAGE.test(file.type)) {
          await this.#attachImage(file, id);
          continue;
        }
        const text = await textOf(file);
        if (id !== this.#conversationId) return; // another conversation was opened meanwhile
        const before = this.#area.value.trimEnd();
        this.#area.value = `${before ? `${before}\n\n` : ""}${fenced(file.name, text)}\n`;
      } catch (error) {
        problems.push(error.message);
      }
    }
    this.#changed();
    this.tell(problems.join(" ") || null);
    this.#area.focus();
  }
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
  if (file.size > MAX_FILE_BYTES) {
    throw new Error(`${file.name} has ${Math.ceil(file.size / 1024)} KiB; at most 256 KiB can be attached.`);
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    // told below
  }
  throw new Error(`${file.name} is not a text file in UTF-8.`);
}

/** A file as fenced code; the fence is longer than any in it. */
function fenced(name, text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  const language = /\.(\w{1,12})$/.exec(name)?.[1] ?? "";
  return `${name}:\n\n${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}`;
}
