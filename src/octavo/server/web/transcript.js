// The conversation on the page: one list item a message, the last of which may still be growing.
import { fenced, sizeOf } from "./attachments.js";
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

/** Shows a conversation. `onAction(name, index, button)` hears of the buttons of messages and code. */
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

  /** place: { index, action } of the button that keeps the focus, null to show the end. */
  show(messages, place = null) {
    this.#list.replaceChildren();
    this.#views = [];
    messages.forEach((message) => this.append(message));
    this.toEnd();
    if (!place) return;
    const { item } = this.#views[place.index];
    item.scrollIntoView({ block: "nearest" });
    const buttons = [...item.querySelectorAll(".versions button")];
    const same = buttons.find(({ dataset }) => dataset.action === place.action);
    (same.disabled ? buttons.find((button) => button !== same) : same).focus({ preventScroll: true });
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
    shown.push(...(message.media ?? []).map(mediumNode));
    view.body.replaceChildren(...shown, ...typedNodes(message.content), ...(message.files ?? []).map(fileNode));
    view.item.classList.remove("is-editing");
    view.item.querySelector(".actions")?.remove();
    const edit = iconButton("edit", "Edit this message", "edit");
    const branch = iconButton("branch", "Branch: continue from here in a new chat", "branch");
    const copy = iconButton("copy", "Copy", "copy");
    view.item.append(element("div", { className: "actions" }, ...versionNodes(message), edit, branch, copy));
  }

  /** Shows what an answer has become so far. progress: { done, total } of its prompt, null once it is read. */
  update(index, message, progress = null) {
    const view = this.#views[index];
    if (!view) return;
    const isAtEnd = this.#isAtEnd();
    if (progress) this.#showReading(view, progress);
    if (message.reasoning) this.#showThinking(view, message);
    if (message.content) {
      if (!view.markdown) {
        this.#clearWaiting(view);
        const root = element("div", { className: "markdown" });
        view.body.append(root);
        view.markdown = new MarkdownView(root);
      }
      view.markdown.update(message.content);
    }
    if (isAtEnd) this.toEnd();
    else this.#showJump();
  }

  /** Takes the place of the dots until the first token. */
  #showReading(view, { done, total }) {
    const waiting = view.body.querySelector(".waiting");
    if (!waiting) return;
    let bar = waiting.querySelector("progress");
    if (!bar) {
      bar = element("progress", { ariaLabel: "Reading the prompt" });
      waiting.classList.add("is-reading");
      waiting.replaceChildren(element("span"), bar);
    }
    bar.max = total;
    bar.value = done;
    const tokens = `${number.format(done)} of ${number.format(total)} tokens`;
    waiting.querySelector("span").textContent = `Reading the prompt: ${tokens}`;
  }

  #showThinking(view, message) {
    if (!view.thinking) {
      this.#clearWaiting(view);
      const text = element("p");
      const details = element("details", { className: "thinking" }, element("summary", {}, "Thinking"), text);
      view.body.prepend(details);
      view.thinking = { details, text };
    }
    if (view.thinking.text.textContent !== message.reasoning) view.thinking.text.textContent = message.reasoning;
    view.thinking.details.querySelector("summary").textContent = message.content ? "Thoughts" : "Thinking…";
  }

  #clearWaiting(view) {
    view.body.querySelector(".waiting")?.remove();
  }

  /** Shows that the answer is being written, with dots until it has a text. */
  wait(index) {
    const { item, body, markdown, thinking } = this.#views[index];
    item.querySelector(".actions")?.remove();
    item.setAttribute("aria-busy", "true");
    if (markdown || thinking) return;
    body.append(element("span", { className: "waiting", ariaLabel: "Waiting for the model" }, element("i"), element("i"), element("i")));
  }

  /** An answer is over: with its figures, or with what went wrong. */
  finish(index, message) {
    const view = this.#views[index];
    if (!view) return;
    const isAtEnd = this.#isAtEnd();
    this.#clearWaiting(view);
    view.item.removeAttribute("aria-busy");
    this.update(index, message);
    for (const old of view.item.querySelectorAll(".actions, .failure, .truncation")) old.remove();
    if (message.truncated) view.body.before(truncationNode(message.truncated, index));
    if (message.error) view.item.append(failureNode(message.error));
    const actions = element("div", { className: "actions" }, ...versionNodes(message));
    if (message.content) actions.append(iconButton("copy", "Copy this answer", "copy"));
    if (!message.error) actions.append(iconButton("again", "Answer again", "again"));
    const notes = [...formatRate(message.stats ?? {}), ...endingNotes(message)];
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

/** ‹ 1/2 › for a message with versions. */
function versionNodes({ versions }) {
  if (!versions) return [];
  const { at, tails } = versions;
  const previous = iconButton("previous", "Previous version", "previous");
  const next = iconButton("next", "Next version", "next");
  previous.disabled = at === 0;
  next.disabled = at === tails.length - 1;
  const place = element("span", {}, `${at + 1}/${tails.length}`);
  place.setAttribute("aria-label", `Version ${at + 1} of ${tails.length}`);
  place.setAttribute("role", "img");
  return [element("span", { className: "versions" }, previous, place, next)];
}

/** A file of a message: a chip that opens. */
function mediumNode(medium) {
  const name = element("span", { className: "chip-name" }, medium.name);
  const chip = element("div", { className: "chip" }, icon("file"), name, element("span", { className: "chip-size" }, sizeOf(medium)));
  return element("div", { className: "file" }, chip);
}

function fileNode(file) {
  const name = element("span", { className: "chip-name" }, file.name);
  const summary = element("summary", { className: "chip" }, icon("file"), name, element("span", { className: "chip-size" }, sizeOf(file)));
  return element("details", { className: "file" }, summary, ...typedNodes(fenced(file).slice(file.name.length + 1).trim()));
}

function truncationNode(numTokens, index) {
  const what = `${number.format(numTokens)} ${numTokens === 1 ? "token was" : "tokens were"} left out`;
  const where = index === 1 ? "from the middle of your message" : "the oldest messages first, then the middle of your last message";
  return element("p", { className: "truncation", role: "note" }, `This chat is longer than the model's context: ${what}, ${where}.`);
}

function failureNode(error) {
  const retry = element("button", { type: "button", className: "button" }, "Try again");
  retry.dataset.action = "again";
  return element("div", { className: "failure", role: "alert" }, element("span", {}, error), retry);
}

/** Why an answer ended before the model ended it. */
function endingNotes({ ending, limit, error }) {
  if (ending === "length") return [limit ? `cut off at Max tokens (${number.format(limit)})` : "cut off: the context is full"];
  if (ending === "limit") return ["cut off at 4,096 tokens; raise Max tokens in the settings for more"];
  return ending === "stopped" && !error ? ["stopped"] : [];
}

/** Shows for a moment that it was done. */
export function confirmOn(button) {
  const before = [...button.childNodes];
  const hasText = before.some((node) => node.nodeType === Node.TEXT_NODE);
  button.replaceChildren(icon("check"), ...(hasText ? ["Copied"] : []));
  setTimeout(() => button.replaceChildren(...before), 1500);
}
