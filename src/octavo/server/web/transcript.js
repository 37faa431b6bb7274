// The conversation on the page: one list item a message, the last of which may still be growing.
import { element, icon, iconButton } from "./dom.js";
import { MarkdownView, typedNodes } from "./markdown.js";

const STICK_PX = 48; // this close to the end counts as being at the end

const number = new Intl.NumberFormat("en");

export function formatRate(stats) {
  const parts = [];
  if (stats.tokens) parts.push(`${number.format(stats.tokens)} ${stats.tokens === 1 ? "token" : "tokens"}`);
  if (stats.rate) parts.push(`${stats.rate < 10 ? stats.rate.toFixed(1) : number.format(Math.round(stats.rate))} tokens/s`);
  if (stats.firstToken != null) parts.push(`first token ${seconds(stats.firstToken)}`);
  return parts;
}

function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;
}

/** Shows a conversation. `onAction(name, index, button)` hears of copy, copy-code, edit, branch and again. */
export class Transcript {
  #scroll;
  #list;
  #jump;
  #onAction;
  #views = []; // by message: { item, body, markdown, thinking }

  constructor({ scroll, list, jump, onAction }) {
    this.#scroll = scroll;
    this.#list = list;
    this.#jump = jump;
    this.#onAction = onAction;
    list.addEventListener("click", (event) => this.#clicked(event));
    scroll.addEventListener("scroll", () => this.#showJump(), { passive: true });
    jump.addEventListener("click", () => this.toEnd());
  }

  show(messages) {
    this.#list.replaceChildren();
    this.#views = [];
    messages.forEach((message) => this.append(message));
    this.toEnd();
  }

  append(message) {
    const item = element("li", { className: `message ${message.role}` });
    const label = message.role === "user" ? "You" : "Answer";
    item.append(element("span", { className: "visually-hidden" }, `${label}: `));
    const body = element("div", { className: "body" });
    item.append(body);
    const view = { item, body, markdown: null, thinking: null };
    this.#views.push(view);
    this.#list.append(item);
    if (message.role === "user") this.#fillUser(view, message);
    else this.finish(this.#views.length - 1, message);
  }

  #fillUser(view, message) {
    const images = (message.images ?? []).map(({ name, url }) => element("img", { src: url, alt: name }));
    const shown = images.length ? [element("div", { className: "images" }, ...images)] : [];
    view.body.replaceChildren(...shown, ...typedNodes(message.content));
    view.item.classList.remove("is-editing");
    view.item.querySelector(".actions")?.remove();
    const edit = iconButton("edit", "Edit this message", "edit");
    const branch = iconButton("branch", "Branch: go on from here in a new chat", "branch");
    const copy = iconButton("copy", "Copy", "copy");
    view.item.append(element("div", { className: "actions" }, edit, branch, copy));
  }

  /** Shows what an answer has become so far. */
  update(index, message) {
    const view = this.#views[index];
    if (!view) return;
    const isAtEnd = this.#isAtEnd();
    if (message.reasoning) this.#showThinking(view, message);
    if (message.content) {
      if (!view.markdown) {
        view.body.querySelector(".waiting")?.remove();
        const root = element("div", { className: "markdown" });
        view.body.append(root);
        view.markdown = new MarkdownView(root);
      }
      view.markdown.update(message.content);
    }
    if (isAtEnd) this.toEnd();
    else this.#showJump();
  }

  #showThinking(view, message) {
    if (!view.thinking) {
      view.body.querySelector(".waiting")?.remove();
      const text = element("p");
      const details = element("details", { className: "thinking" }, element("summary", {}, "Thinking"), text);
      view.body.prepend(details);
      view.thinking = { details, text };
    }
    if (view.thinking.text.textContent !== message.reasoning) view.thinking.text.textContent = message.reasoning;
    view.thinking.details.querySelector("summary").textContent = message.content ? "Thoughts" : "Thinking…";
  }

  wait(index) {
    const { item, body } = this.#views[index];
    item.querySelector(".actions")?.remove();
    item.setAttribute("aria-busy", "true");
    body.append(element("span", { className: "waiting", ariaLabel: "Waiting for the model" }, element("i"), element("i"), element("i")));
  }

  /** An answer is over: with its figures, or with what went wrong. */
  finish(index, message) {
    const view = this.#views[index];
    if (!view) return;
    const isAtEnd = this.#isAtEnd();
    view.body.querySelector(".waiting")?.remove();
    view.item.removeAttribute("aria-busy");
    this.update(index, message);
    for (const old of view.item.querySelectorAll(".actions, .failure")) old.remove();
    if (message.error) {
      const retry = element("button", { type: "button", className: "button" }, "Try again");
      retry.dataset.action = "again";
      view.item.append(element("div", { className: "failure", role: "alert" }, element("span", {}, message.error), retry));
    }
    const actions = element("div", { className: "actions" });
    if (message.content) actions.append(iconButton("copy", "Copy this answer", "copy"));
    if (!message.error) actions.append(iconButton("again", "Answer again", "again"));
    const notes = formatRate(message.stats ?? {});
    if (message.ending === "length") notes.push(message.limit ? `ended at Max tokens, ${message.limit}` : "ended: the context is full");
    if (message.truncated) {
      const where = index === 1 ? "from the middle of your message" : "the oldest turns first, then the middle of your message";
      notes.push(`the context is full: ${message.truncated} tokens were left out, ${where}`);
    }
    if (message.ending === "limit") notes.push("ended at 4,096 tokens; Max tokens in the settings allows more");
    if (message.ending === "stopped" && !message.error) notes.push("stopped");
    actions.append(element("span", { className: "stats" }, ...notes.map((note) => element("span", {}, note))));
    view.item.append(actions);
    if (isAtEnd) this.toEnd();
  }

  /** Turns a message of the user into a field; `onDone(text)` hears the new text, or null if nothing is to change. */
  edit(index, message, onDone) {
    const view = this.#views[index];
    const area = element("textarea", { value: message.content, rows: Math.min(12, message.content.split("\n").length + 1) });
    area.setAttribute("aria-label", "Edit the message");
    const cancel = element("button", { type: "button", className: "button" }, "Cancel");
    const save = element("button", { type: "button", className: "button primary" }, "Send");
    const done = (text) => {
      this.#fillUser(view, message);
      onDone(text);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        done(null);
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (area.value.trim()) done(area.value.trim());
      }
    });
    cancel.addEventListener("click", () => done(null));
    save.addEventListener("click", () => area.value.trim() && done(area.value.trim()));
    view.item.querySelector(".actions")?.remove();
    view.item.classList.add("is-editing");
    const buttons = element("div", { className: "editor-buttons" }, cancel, save);
    view.body.replaceChildren(element("div", { className: "editor" }, area, buttons));
    area.focus();
  }

  toEnd() {
    this.#scroll.scrollTop = this.#scroll.scrollHeight;
    this.#showJump();
  }

  #isAtEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroll;
    return scrollHeight - scrollTop - clientHeight < STICK_PX;
  }

  #showJump() {
    this.#jump.hidden = this.#isAtEnd();
  }

  #clicked(event) {
    const button = event.target.closest("button[data-action]");
    if (!button) return;
    if (button.dataset.action === "copy-code") {
      this.#onAction("copy-code", button.closest(".code").querySelector("code").textContent, button);
      return;
    }
    const index = this.#views.findIndex((view) => view.item.contains(button));
    if (index >= 0) this.#onAction(button.dataset.action, index, button);
  }
}

/** Says for a moment that it was done. */
export function confirmOn(button) {
  const before = [...button.childNodes];
  const hasText = before.some((node) => node.nodeType === Node.TEXT_NODE);
  button.replaceChildren(icon("check"), ...(hasText ? ["Copied"] : []));
  setTimeout(() => button.replaceChildren(...before), 1500);
}
