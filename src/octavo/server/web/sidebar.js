// The list of conversations.
import { byId, element, iconButton } from "./dom.js";
import { allConversations, isConversationKey } from "./store.js";

export class Sidebar {
  #panel = byId("sidebar");
  #opener = byId("open-sidebar");
  #backdrop = byId("backdrop");
  #list = byId("conversations");
  #search = byId("search");
  #currentId = "";
  #onRename;

  constructor({ onOpen, onRemove, onNew, onRename }) {
    this.#onRename = onRename;
    this.#search.addEventListener("input", () => this.show(this.#currentId));
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
      } else if (button.dataset.action === "rename") {
        this.#rename(button.closest("li"), id);
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
    const wanted = this.#search.value.trim().toLowerCase();
    const isFound = ({ title, messages }) =>
      [title, ...messages.map((message) => message.content)].some((text) => text.toLowerCase().includes(wanted));
    const found = wanted ? allConversations().filter(isFound) : allConversations();
    const items = found.map((conversation) => {
      const title = conversation.title || "Untitled";
      const open = element("button", { type: "button", className: "open", title }, title);
      const date = new Date(conversation.updated);
      const time = element("time", { dateTime: date.toISOString(), title: date.toLocaleString() }, dateText(date));
      const rename = iconButton("edit", `Rename “${title}”`, "rename");
      rename.classList.add("rename");
      const remove = iconButton("trash", `Delete “${title}”`, "remove");
      remove.classList.add("remove");
      const item = element("li", {}, open, time, rename, remove);
      item.dataset.id = conversation.id;
      if (conversation.id === currentId) {
        item.className = "current";
        open.setAttribute("aria-current", "true");
      }
      return item;
    });
    this.#list.replaceChildren(...items);
  }

  /** Turns a title into a field; Enter or leaving it keeps what was typed, Escape does not. */
  #rename(item, id) {
    const value = item.querySelector(".open").textContent;
    const field = element("input", { type: "text", className: "title-field", value, maxLength: 120, ariaLabel: "Title" });
    let isDone = false;
    const done = (title) => {
      if (isDone) return;
      isDone = true;
      if (title && title !== value) this.#onRename(id, title);
      else this.show(this.#currentId);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      done(event.key === "Enter" ? field.value.trim() : null);
    });
    field.addEventListener("blur", () => done(field.value.trim()));
    item.replaceChildren(field);
    field.select();
  }
}

/** Today's by the time, others by the day. */
function dateText(date) {
  const now = new Date();
  if (date.toDateString() === now.toDateString()) return date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  const year = date.getFullYear() === now.getFullYear() ? undefined : "numeric";
  return date.toLocaleDateString([], { day: "numeric", month: "short", year });
}
