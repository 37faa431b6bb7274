// Prompt presets: system prompts with a name, a few of them built in, the rest kept in this browser.
import { byId, element } from "./dom.js";
import { loadPresets, savePresets } from "./store.js";

const BUILT_IN = [
  { name: "Concise", text: "Answer in as few words as the question allows. Do not repeat the question." },
  {
    name: "Programmer",
    text: "You are an experienced programmer. Give working code first, then explain it briefly. Say so when you are not sure.",
  },
  {
    name: "Proofreader",
    text: "Correct the spelling, grammar and punctuation of the text. Keep its meaning and tone. Reply with the corrected text only.",
  },
  { name: "Summarizer", text: "Summarize the text in at most five short bullet points. Add nothing that is not in it." },
  { name: "Translator", text: "Translate the text into English. Reply with the translation only." },
];

export class Presets {
  #picker = byId("preset");
  #system = byId("system");
  #nameRow = byId("preset-name-row");
  #name = byId("preset-name");
  #own = loadPresets();
  #onSystem;

  /** onSystem(text): a preset has filled in the system prompt. */
  constructor({ onSystem }) {
    this.#onSystem = onSystem;
    this.#picker.addEventListener("change", () => this.#choose());
    byId("save-preset").addEventListener("click", () => this.#askForName());
    byId("delete-preset").addEventListener("click", () => this.#remove());
    byId("keep-preset").addEventListener("click", () => this.#keep());
    byId("preset-name").addEventListener("keydown", (event) => {
      if (event.key === "Enter") {
        event.preventDefault();
        this.#keep();
      } else if (event.key === "Escape") {
        event.stopPropagation(); // it would close the settings
        this.#closeName();
      }
    });
    this.show();
  }

  /** Shows which preset the system prompt is. */
  show() {
    const text = this.#system.value.trim();
    const options = [["", "Custom"], ...this.#all().map(({ name }) => [name, name])];
    this.#picker.replaceChildren(...options.map(([value, label]) => element("option", { value }, label)));
    const chosen = text ? this.#all().find((preset) => preset.text === text) : undefined;
    this.#picker.value = chosen?.name ?? "";
    byId("delete-preset").disabled = !this.#own.includes(chosen);
    byId("save-preset").disabled = !text || chosen !== undefined;
  }

  /** Reads the presets again: an import has added some. */
  reload() {
    this.#own = loadPresets();
    this.show();
  }

  /** The user's presets, then those built-in ones whose name the user has not taken. */
  #all() {
    const names = new Set(this.#own.map(({ name }) => name));
    return [...this.#own, ...BUILT_IN.filter(({ name }) => !names.has(name))];
  }

  #choose() {
    const text = this.#all().find(({ name }) => name === this.#picker.value)?.text ?? "";
    this.#system.value = text;
    this.#onSystem(text);
    this.show();
  }

  #askForName() {
    this.#nameRow.hidden = false;
    this.#name.value = "";
    this.#name.focus();
  }

  #keep() {
    const name = this.#name.value.trim();
    if (!name) return this.#name.focus();
    const others = this.#own.filter((preset) => preset.name !== name);
    const own = [...others, { name, text: this.#system.value.trim() }].sort((a, b) => a.name.localeCompare(b.name));
    if (this.#save(own)) this.#closeName();
  }

  #remove() {
    this.#save(this.#own.filter(({ name }) => name !== this.#picker.value));
    this.show();
    this.#picker.focus();
  }

  /** False, and nothing changes, if the browser's storage is full or forbidden. */
  #save(own) {
    const isSaved = savePresets(own);
    if (isSaved) this.#own = own;
    byId("preset-result").textContent = isSaved ? "" : "The browser's storage is full: the preset could not be saved.";
    return isSaved;
  }

  #closeName() {
    this.#nameRow.hidden = true;
    this.show();
    this.#picker.focus();
  }
}
