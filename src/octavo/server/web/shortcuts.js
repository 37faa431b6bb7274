// The dialog that lists the keyboard shortcuts.
import { byId } from "./dom.js";

export class Shortcuts {
  #dialog = byId("shortcuts");

  constructor() {
    if (/Mac|iPhone|iPad/.test(navigator.platform)) {
      for (const key of this.#dialog.querySelectorAll("kbd")) if (key.textContent === "Ctrl") key.textContent = "⌘";
    }
    byId("open-shortcuts").addEventListener("click", () => this.toggle());
    byId("close-shortcuts").addEventListener("click", () => this.toggle());
    this.#dialog.addEventListener("click", (event) => event.target === this.#dialog && this.toggle()); // beside it
  }

  get isOpen() {
    return this.#dialog.open;
  }

  toggle() {
    if (this.isOpen) this.#dialog.close();
    else this.#dialog.showModal();
  }
}
