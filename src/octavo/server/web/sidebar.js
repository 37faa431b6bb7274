// The list of conversations.
import { byId, element, iconButton } from "./dom.js";
import { allConversations, isConversationKey } from "./store.js";

export class Sidebar {
  #panel = byId("sidebar");
  #opener = byId("open-sidebar");
  #backdrop = byId("backdrop");
  #list = byId("conversations");
  #currentId = "";

  constructor({ onOpen, onRemove, onNew }) {
    byId("new-chat").addEventListener("click", () => {
      this.toggle(false);
      onNew();
    });
    this.#opener.addEventListener("click", () => this.toggle(true));
    byId("close-sidebar").addEventListener("click", () => this.toggle(false));
    this.#backdrop.addEventListener("click", () => this.toggle(false));
    this.#panel.addEventListener("keydown", (event) => event.key === "Escape" && this.toggle(false));
    this.#list.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      const { id } = button.closest("li").dataset;
      if (button.dataset.action === "remove") {
        const next = button.closest("li").nextElementSibling?.dataset.id;
        onRemove(id);
        (this.#list.querySelector(`li[data-id="${next}"] .open`) ?? byId("new-chat")).focus();
      } else {
        this.toggle(false);
        onOpen(id);
      }
    });
    addEventListener("storage", (event) => isConversationKey(event.key) && this.show(this.#currentId));
  }

  toggle(open) {
    if (this.#panel.classList.contains("is-open") === open) return;
    this.#panel.classList.toggle("is-open", open);
    this.#backdrop.hidden = !open;
    this.#opener.setAttribute("aria-expanded", String(open));
    (open ? byId("close-sidebar") : this.#opener).focus();
  }

  show(currentId) {
    this.#currentId = currentId;
    const items = allConversations().map((conversation) => {
      const title = conversation.title || "Untitled";
      const open = element("button", { type: "button", className: "open", title }, title);
      const remove = iconButton("trash", `Delete “${title}”`, "remove");
      remove.classList.add("remove");
      const item = element("li", {}, open, remove);
      item.dataset.id = conversation.id;
      if (conversation.id === currentId) {
        item.className = "current";
        open.setAttribute("aria-current", "true");
      }
      return item;
    });
    this.#list.replaceChildren(...items);
  }
}
