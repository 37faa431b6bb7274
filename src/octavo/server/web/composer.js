// The field that messages are written in: drafts that survive a reload, and files that are attached as text.
import { byId } from "./dom.js";
import { loadDraft, saveDraft } from "./store.js";

const MAX_FILE_BYTES = 256 * 1024; // more than a context holds

export class Composer {
  #area = byId("prompt");
  #problem = byId("problem");
  #conversationId = "";

  constructor() {
    this.#area.addEventListener("input", () => this.#changed());
    byId("attach").addEventListener("click", () => byId("files").click());
    byId("files").addEventListener("change", (event) => this.#attach(event.target));
  }

  get text() {
    return this.#area.value.trim();
  }

  /** Shows the draft of a conversation; "" for one that has not begun. */
  open(id) {
    this.#conversationId = id;
    this.#set(loadDraft(id));
  }

  clear() {
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
    byId("send").disabled = !this.text;
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

  async #attach(input) {
    const id = this.#conversationId;
    const files = [...input.files];
    input.value = "";
    const problems = [];
    for (const file of files) {
      try {
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
