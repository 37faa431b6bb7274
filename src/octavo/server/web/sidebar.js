// The list of conversations.
import { byId, element, iconButton } from "./dom.js";
import { allConversations, isConversationKey } from "./store.js";

export class Sidebar {
  #panel = byId("sidebar");
  #opener = byId("open-sidebar");
  #backdrop = byId("backdrop");
  #list = byId("conversations");
  #search = byId("search");
  #nothing = byId("no-conversations");
  #undo = byId("undo");
  #currentId = "";
  #isBusy;
  #onRemove;
  #onRename;
  #isRenaming = false;

  /** isBusy(id): whether an answer is being written in a conversation. */
  constructor({ isBusy, onOpen, onRemove, onNew, onRename }) {
    this.#isBusy = isBusy;
    this.#onRemove = onRemove;
    this.#onRename = onRename;
    this.#search.addEventListener("input", () => this.show(this.#currentId));
    byId("new-chat").addEventListener("click", () => {
      this.toggle(false);
      onNew();
    });
    this.#opener.addEventListener("click", () => this.toggle(true));
    byId("close-sidebar").addEventListener("click", () => this.toggle(false));
    this.#backdrop.addEventListener("click", () => this.toggle(false));
    byId("dismiss-undo").addEventListener("click", () => this.#endUndo());
    this.#panel.addEventListener("keydown", (event) => event.key === "Escape" && this.toggle(false));
    this.#list.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      const item = button.closest("li");
      const { id } = item.dataset;
      if (button.dataset.action === "remove") this.#remove(item, id);
      else if (button.dataset.action === "rename") this.#rename(item, id);
      else {
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

  /** Moves to the search field. */
  search() {
    if (getComputedStyle(this.#opener).display !== "none") this.toggle(true);
    this.#search.focus();
    this.#search.select();
  }

  /** Offers to take a deletion back, until it is taken back, dismissed or followed by another. */
  offerUndo(title, undo) {
    this.#undo.querySelector("span").textContent = `Deleted “${title || "Untitled"}”`;
    this.#undo.hidden = false;
    byId("undo-deletion").onclick = () => {
      this.#endUndo();
      undo();
    };
  }

  #endUndo() {
    this.#undo.hidden = true;
    byId("undo-deletion").onclick = null;
    byId("new-chat").focus();
  }

  show(currentId) {
    this.#currentId = currentId;
    if (this.#isRenaming) return; // it ends with another call
    const focused = this.#list.contains(document.activeElement) ? document.activeElement : null;
    const id = focused?.closest("li").dataset.id;
    const action = focused?.dataset.action;
    const wanted = this.#search.value.trim();
    const found = allConversations().filter((conversation) => !wanted || matches(conversation, wanted.toLowerCase()));
    this.#list.replaceChildren(...found.map((conversation) => this.#item(conversation)));
    const wasFocused = action ? `[data-action="${action}"]` : ".open";
    if (focused) this.#list.querySelector(`li[data-id="${id}"] ${wasFocused}`)?.focus();
    this.#nothing.hidden = found.length > 0;
    this.#nothing.textContent = wanted ? `No chats match “${wanted}”.` : "No chats yet.";
  }

  #item(conversation) {
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
    if (this.#isBusy(conversation.id)) {
      const dot = element("span", { className: "busy", title: "The model is answering" });
      dot.setAttribute("role", "img");
      dot.setAttribute("aria-label", "The model is answering");
      item.prepend(dot);
    }
    if (conversation.id === this.#currentId) {
      item.className = "current";
      open.setAttribute("aria-current", "true");
    }
    return item;
  }

  #remove(item, id) {
    const next = item.nextElementSibling?.dataset.id;
    this.#onRemove(id);
    (this.#list.querySelector(`li[data-id="${next}"] .open`) ?? byId("new-chat")).focus();
  }

  /** Turns a title into a field; Enter or leaving it keeps what was typed, Escape does not. */
  #rename(item, id) {
    this.#isRenaming = true;
    const value = item.querySelector(".open").textContent;
    const field = element("input", { type: "text", className: "title-field", value, maxLength: 120, ariaLabel: "Title" });
    let isDone = false;
    const done = (title) => {
      if (isDone) return;
      isDone = true;
      this.#isRenaming = false;
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

/** Whether a title, a message or a file's name contains the text, which is in lower case. */
function matches({ title, messages }, wanted) {
  const texts = [title, ...messages.flatMap(({ content, media = [], files = [] }) => [content, ...[...media, ...files].map(({ name }) => name)])];
  return texts.some((text) => text.toLowerCase().includes(wanted));
}

/** Today's by the time, others by the day. */
function dateText(date) {
  const now = new Date();
  if (date.toDateString() === now.toDateString()) return date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  const year = date.getFullYear() === now.getFullYear() ? undefined : "numeric";
  return date.toLocaleDateString([], { day: "numeric", month: "short", year });
}
