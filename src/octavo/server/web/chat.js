// The chat page: turns the user's actions into requests, and the model's answers into text.
import { ServerError, streamChat } from "./api.js";
import { Composer } from "./composer.js";
import { byId, copyText } from "./dom.js";
import { exportJson, exportMarkdown } from "./export.js";
import { Models } from "./models.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";
import { Transcript, confirmOn, formatRate } from "./transcript.js";

const SAVE_INTERVAL_MS = 1000;
const SLOW_MS = 1000; // without a token for so long, the model may have to be loaded
const LEAVING_MS = 200; // from the end of a page's connections to that of the page
const LEAST_RATE_S = 0.1; // a rate over less time says nothing
const ANSWER_LIMIT = 4096; // tokens of an answer without Max tokens; settings and `octavo run` have the same

const prompt = byId("prompt");
const send = byId("send");
const stop = byId("stop");
const live = byId("live");

let conversation = store.newConversation();
let run = null; // the answer that is being written: { conversation, message, index, controller }

const transcript = new Transcript({
  scroll: byId("scroll"),
  list: byId("messages"),
  jump: byId("jump"),
  onAction: act,
});
const composer = new Composer();
const settings = new Settings({
  onSystem: (text) => {
    conversation.system = text;
    if (conversation.messages.length) save();
  },
  onKey: () => models.refresh(),
});
const models = new Models({
  onCards: (card) => {
    byId("welcome-note").textContent = "Everything stays between this browser and your server.";
    settings.showDefaults(card);
    composer.sees = card?.input_modalities?.includes("image") ?? false;
  },
  onError: (error) => {
    byId("welcome-note").textContent = describe(error);
  },
});
const sidebar = new Sidebar({ onOpen: open, onNew: startNew, onRemove: remove, onRename: rename });

// Conversations

function show() {
  transcript.show(conversation.messages);
  byId("welcome").hidden = conversation.messages.length > 0;
  settings.showSystem(conversation.system);
  models.choose(conversation.model);
  document.title = conversation.title ? `${conversation.title} · Octavo` : "Octavo";
  byId("export-menu").hidden = !conversation.messages.length;
  sidebar.show(conversation.id);
  composer.open(conversation.title ? conversation.id : "");
}

function open(id) {
  halt();
  conversation = store.findConversation(id) ?? store.newConversation();
  remember(conversation.id);
  show();
  focusPrompt();
}

function startNew() {
  halt();
  const { system } = conversation;
  conversation = { ...store.newConversation(), system };
  remember("");
  show();
  focusPrompt();
}

function remove(id) {
  store.removeConversation(id);
  store.saveDraft(id, "");
  if (id === conversation.id) startNew();
  else sidebar.show(conversation.id);
}

function remember(id) {
  history.replaceState(null, "", id ? `#${id}` : location.pathname);
}

function save() {
  conversation.updated = Date.now();
  if (!store.saveConversation(conversation)) say("The browser's storage is full: this conversation is not kept.");
  remember(conversation.id);
  sidebar.show(conversation.id);
}

// Asking

function submit() {
  const { text, images } = composer;
  if (composer.isEmpty || run || isRefused()) return;
  composer.clear();
  ask(text, images);
  composer.open(conversation.id);
}

/** Whether a setting keeps a question from being sent; says which. */
function isRefused() {
  const problem = settings.problem();
  composer.tell(problem);
  return problem !== null;
}

function ask(text, images = []) {
  if (!conversation.title) conversation.title = store.titleOf(text || images[0].name);
  const message = { role: "user", content: text, ...(images.length && { images }) };
  conversation.messages.push(message);
  byId("welcome").hidden = true;
  byId("export-menu").hidden = false;
  document.title = `${conversation.title} · Octavo`;
  transcript.append(message);
  answer();
}

function requestBody() {
  const messages = conversation.messages
    .filter((message) => message.role === "user" || message.content)
    .map(({ role, content, images }) => ({ role, content: images ? parts(content, images) : content }));
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  return {
    ...(models.chosen && { model: models.chosen }),
    messages,
    stream: true,
    stream_options: { include_usage: true },
    timings: true,
    truncate_prompt_tokens: -1,
    truncation_side: "turns",
    ...settings.sampling(),
  };
}

/** The content of a message with images, which stand before its text. */
function parts(text, images) {
  const shown = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...shown, { type: "text", text }] : shown;
}

async function answer() {
  const body = requestBody();
  conversation.model = models.chosen;
  const message = { role: "assistant", content: "", reasoning: "", model: models.chosen, stats: {}, ending: "stopped" };
  message.limit = body.max_tokens ?? null;
  conversation.messages.push(message);
  const index = conversation.messages.length - 1;
  transcript.append(message);
  transcript.wait(index);
  transcript.toEnd();
  const current = { conversation, message, index, controller: new AbortController() };
  run = current;
  showRunning();
  save();
  say("The model is answering.");
  try {
    await receiveWhenLoaded(current, body);
  } catch (error) {
    // A page that is being left may lose its connections first; then nothing of this happens but what halt does.
    if (error.status === 0) await new Promise((resolve) => setTimeout(resolve, LEAVING_MS));
    if (!current.controller.signal.aborted) message.error = describe(error);
  }
  if (run === current) run = null;
  if (models.card?.state !== "loaded") models.refresh(); // the question has loaded it
  store.saveConversation(current.conversation);
  if (current.conversation === conversation) transcript.finish(index, message);
  showRunning();
  say(message.error ?? "The answer is complete.");
}

/** Reads the answer into the message. A model that is still being loaded is waited for, with its progress shown. */
async function receiveWhenLoaded(current, body) {
  const slow = setTimeout(() => models.refresh(), SLOW_MS);
  try {
    for (;;) {
      try {
        return await receive(current, body);
      } catch (error) {
        if (error.code !== "model_loading" || !(await models.loaded(current.controller.signal))) throw error;
      }
    }
  } finally {
    clearTimeout(slow);
  }
}

/**
 * Reads the answer into the message. Its figures: from the request to the first token, and tokens a second after, in the
 * end as the server measured them.
 */
async function receive(current, body) {
  const { message } = current;
  const start = performance.now();
  let first = null;
  let lastSave = start;
  let numDeltas = 0;
  let isDrawn = true;
  const draw = () => {
    isDrawn = true;
    if (run !== current) return;
    transcript.update(current.index, message);
    live.textContent = formatRate(message.stats).join("  ·  ");
  };
  for await (const event of streamChat(body, current.controller.signal)) {
    const now = performance.now();
    const choice = event.choices?.[0];
    const text = choice?.delta?.content ?? "";
    const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
    if (text || thought) {
      first ??= now;
      numDeltas++;
      message.content += text;
      message.reasoning += thought;
      message.stats = stats(numDeltas, start, first, now);
    }
    if (choice?.finish_reason) message.ending = choice.finish_reason;
    if (event.usage?.truncated_tokens) message.truncated = event.usage.truncated_tokens;
    if (event.usage && first !== null) {
      message.stats = stats(event.usage.completion_tokens, start, first, now);
      // An answer may come in one burst: the server knows how long it took.
      message.stats.rate = event.timings?.predicted_per_second || message.stats.rate;
    }
    if (isDrawn) {
      isDrawn = false;
      requestAnimationFrame(draw);
    }
    if (message.limit === null && numDeltas >= ANSWER_LIMIT && message.ending === "stopped") {
      message.ending = "limit";
      return; // which ends the request
    }
    if (now - lastSave > SAVE_INTERVAL_MS) {
      lastSave = now;
      store.saveConversation(current.conversation);
    }
  }
}

function stats(tokens, start, first, now) {
  const elapsed = (now - first) / 1000;
  const rate = tokens > 1 && elapsed > LEAST_RATE_S ? (tokens - 1) / elapsed : null;
  return { tokens, firstToken: (first - start) / 1000, rate };
}

function describe(error) {
  if (!(error instanceof ServerError)) return `Something went wrong in this page: ${error.message}`;
  if (error.status === 401) settings.askForKey();
  return error.text;
}

/** Ends the answer that is being written; what it has so far stays. */
function halt() {
  if (!run) return;
  run.message.ending = "stopped";
  store.saveConversation(run.conversation);
  run.controller.abort();
  run = null;
  showRunning();
}

function act(action, target, button) {
  if (action === "copy-code") copy(target, button);
  else if (action === "copy") copy(conversation.messages[target].content, button);
  else if (action === "again") again(target);
  else if (action === "edit") edit(target);
  else if (action === "branch") branch(target);
}

async function copy(text, button) {
  if (await copyText(text)) {
    confirmOn(button);
    say("Copied.");
  }
}

function again(index) {
  if (isRefused()) return;
  halt();
  conversation.messages.length = index;
  transcript.show(conversation.messages);
  answer();
  focusPrompt();
}

/** A new conversation with all that came before this message, which can be written anew; the old one stays as it is. */
function branch(index) {
  halt();
  const { title, system, model, messages } = conversation;
  const copy = structuredClone(messages.slice(0, index));
  conversation = { ...store.newConversation(), title: `${title} (branch)`, system, model, messages: copy };
  store.saveDraft(conversation.id, messages[index].content);
  save();
  show();
  composer.take(messages[index].images);
  focusPrompt();
}

function rename(id, title) {
  const renamed = id === conversation.id ? conversation : store.findConversation(id);
  if (renamed) {
    renamed.title = title;
    store.saveConversation(renamed);
  } // else another tab has removed it
  sidebar.show(conversation.id);
  if (id === conversation.id) document.title = `${title} · Octavo`;
}

function edit(index) {
  const message = conversation.messages[index];
  transcript.edit(index, message, (text) => {
    if (text === null || (text === message.content && index < conversation.messages.length - 1) || isRefused()) return;
    halt();
    conversation.messages.length = index;
    transcript.show(conversation.messages);
    ask(text, message.images);
    focusPrompt();
  });
}

// The page

function showRunning() {
  send.hidden = run !== null;
  stop.hidden = run === null;
  send.disabled = composer.isEmpty;
  if (!run) live.textContent = "";
}

/** Not where that would bring up a keyboard over half of the page. */
function focusPrompt() {
  if (matchMedia("(hover: hover)").matches) prompt.focus();
}

function say(text) {
  byId("status").textContent = text;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
stop.addEventListener("click", () => {
  halt();
  focusPrompt();
});
byId("export-json").addEventListener("click", () => exportWith(exportJson));
byId("export-markdown").addEventListener("click", () => exportWith(exportMarkdown));

function exportWith(write) {
  byId("export-menu").open = false;
  write(conversation);
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (byId("export-menu").open) {
      byId("export-menu").open = false;
      byId("export-menu").querySelector("summary").focus();
    } else if (run) {
      halt();
      focusPrompt();
    }
  } else if ((event.ctrlKey || event.metaKey) && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    startNew();
  } else if ((event.ctrlKey || event.metaKey) && event.key === ",") {
    event.preventDefault();
    settings.toggle();
  }
});
document.addEventListener("click", (event) => {
  if (!byId("export-menu").contains(event.target)) byId("export-menu").open = false;
});
addEventListener("pagehide", halt);

conversation = store.findConversation(location.hash.slice(1)) ?? conversation;
show();
models.refresh();
focusPrompt();
