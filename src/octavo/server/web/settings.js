// The panel at the side: presets, system prompt, sampling, API key.
import { apiKey, setApiKey } from "./api.js";
import { byId, element } from "./dom.js";
import { Presets } from "./presets.js";
import { loadSettings, saveSettings } from "./store.js";

const INTEGERS = ["max_tokens", "top_k", "seed"];
const NUMBERS = [
  "temperature",
  "top_p",
  "min_p",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
  ...INTEGERS,
];
const SAMPLING = [...NUMBERS, "stop_text"];

export class Settings {
  #panel = byId("settings");
  #opener = byId("open-settings");
  #form = byId("settings-form");
  #problem = element("span", { className: "problem" }); // at its field: the panel hides the composer on a phone
  #keyProblem = byId("key-problem");
  #presets;
  #onKey;

  /** onSystem(text): the system prompt was changed. onKey(): the API key was. */
  constructor({ onSystem, onKey }) {
    this.#onKey = onKey;
    this.#presets = new Presets({ onSystem });
    const stored = loadSettings();
    for (const name of SAMPLING) byId(name).value = stored[name] ?? "";
    byId("api-key").value = apiKey();
    this.#opener.addEventListener("click", () => this.toggle());
    byId("close-settings").addEventListener("click", () => this.toggle(false));
    this.#panel.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        this.toggle(false);
      }
    });
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    this.#form.addEventListener("input", (event) => {
      this.#problem.remove();
      if (event.target.id === "system") {
        onSystem(event.target.value);
        this.#presets.show();
      } else if (event.target.id === "api-key") this.showKeyProblem("");
      else if (SAMPLING.includes(event.target.id)) this.#save();
    });
    this.#form.addEventListener("reset", (event) => {
      event.preventDefault();
      for (const name of SAMPLING) byId(name).value = "";
      this.#save();
    });
    byId("api-key").addEventListener("change", (event) => {
      setApiKey(event.target.value.trim());
      this.#onKey();
    });
  }

  toggle(open = this.#panel.hidden, focus = "system") {
    this.#panel.hidden = !open;
    this.#opener.setAttribute("aria-expanded", String(open));
    if (open) byId(focus).focus();
    else this.#opener.focus();
  }

  /** Shows the sampling of empty fields. card: the model's entry in /v1/models. */
  showDefaults(card) {
    const defaults = card?.default_sampling_params ?? {};
    for (const name of NUMBERS) if (defaults[name] != null) byId(name).placeholder = String(defaults[name]);
    const source = card?.default_sampling_source;
    byId("defaults").textContent = source
      ? `Empty fields use the values shown in grey (${source}).`
      : "Empty fields use the model's defaults.";
  }

  showSystem(text) {
    byId("system").value = text;
    this.#presets.show();
  }

  /** Reads the presets again: an import has added some. */
  reloadPresets() {
    this.#presets.reload();
  }

  /** Opens the field of the API key, with the reason. */
  askForKey(problem) {
    this.showKeyProblem(problem);
    this.toggle(true, "api-key");
  }

  /** Shows what is wrong with the API key; "" clears it. */
  showKeyProblem(problem) {
    this.#keyProblem.hidden = !problem;
    this.#keyProblem.textContent = problem;
    byId("api-key").setAttribute("aria-invalid", String(problem !== ""));
  }

  /** What is wrong with the first field whose value is not allowed, in words; null if all are. Shows the field. */
  problem() {
    for (const name of NUMBERS) {
      const input = byId(name);
      if (input.validity.valid) continue;
      const label = input.closest("label").firstChild.textContent.trim();
      const allowed = allowedOf(input);
      this.toggle(true, name);
      this.#problem.textContent = `It must be ${allowed}.`;
      input.after(this.#problem);
      if (input.validity.badInput) return `${label} in the settings is not a number.`;
      return `${label} in the settings is ${input.value}; it must be ${allowed}.`;
    }
    this.#problem.remove();
    return null;
  }

  /** The fields of a request that are filled in; the server has the last word on their values. */
  sampling() {
    const fields = {};
    for (const name of NUMBERS) {
      const input = byId(name);
      if (input.value === "") continue;
      fields[name] = Number(input.value);
    }
    if (byId("stop_text").value) fields.stop = [byId("stop_text").value];
    return fields;
  }

  #save() {
    const values = {};
    for (const name of SAMPLING) if (byId(name).value !== "") values[name] = byId(name).value;
    saveSettings(values);
  }
}

/** The values that a field takes, in words. */
function allowedOf(input) {
  if (input.validity.stepMismatch) return "a whole number";
  if (!input.min) return "a number";
  return input.max ? `from ${input.min} to ${input.max}` : `at least ${input.min}`;
}
