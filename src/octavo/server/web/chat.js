// The chat page: turns the user's actions into requests, and the model's answers into text.
import { receive, requestBody } from "./answering.js";
import { ServerError } from "./api.js";
import { Composer } from "./composer.js";
import { byId, copyText } from "./dom.js";
import { exportJson, exportMarkdown } from "./export.js";
import { Library } from "./library.js";
import { Models } from "./models.js";
import { Settings } from "./settings.js";
import { Shortcuts } from "./shortcuts.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";
import { Transcript, confirmOn, formatRate } from "./transcript.js";
import { setAside, turnTo } from "./versions.js";

const SAVE_INTERVAL_MS = 1000;
const SLOW_MS = 1000; // without a token for so long, the model may have to be loaded
const LEAVING_MS = 200; // from the end of a page's connections to that of the page

const prompt = byId("prompt");
const send = byId("send");
const stop = byId("stop");
const live = byId("live");

let conversation = store.newConversation();
const runs = new Map(); // answers being written, by conversation: { conversation, message, index, controller, progress }

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
  onKey: tryKey,
});
const models = new Models({
  onCards: (card) => {
    settings.showKeyProblem("");
    settings.showDefaults(card);
    composer.fit({ sees: card?.input_modalities?.includes("image") ?? false, pdfAs: card?.pdf_as ?? "pages" });
  },
  onError: (error) => {
    const text = describe(error);
    if (error.status === 401) settings.askForKey(text);
    return text;
  },
});
const shortcuts = new Shortcuts();
const sidebar = new Sidebar({
  isBusy: (id) => runs.has(id),
  onOpen: open,
  onNew: startNew,
  onRemove: remove,
  onRename: rename,
});
new Library({
  onImport: () => {
    settings.reloadPresets();
    const stored = store.findConversation(conversation.id);
    if (stored && !runs.has(stored.id) && stored.updated > conversation.updated) {
      conversation = stored; // else the next save would overwrite what was imported
      show();
    } else sidebar.show(conversation.id);
  },
});

// Conversations

function show() {
  transcript.show(conversation.messages);
  const run = runs.get(conversation.id);
  if (run) {
    transcript.wait(run.index);
    transcript.update(run.index, run.message, run.progress);
  }
  byId("welcome").hidden = conversation.messages.length > 0;
  settings.showSystem(conversation.system);
  models.choose(conversation.model);
  document.title = conversation.title ? `${conversation.title} · Octavo` : "Octavo";
  byId("export-menu").hidden = !conversation.messages.length;
  sidebar.show(conversation.id);
  composer.open(conversation.title ? conversation.id : "");
  showRunning();
}

/** A conversation by its id, null if it is gone. */
function find(id) {
  return runs.get(id)?.conversation ?? store.findConversation(id);
}

function open(id) {
  conversation = find(id) ?? store.newConversation();
  remember(conversation.id);
  show();
  focusPrompt();
}

/** Opens an empty conversation. An answer that is being written in another one goes on. */
function startNew() {
  const { system } = conversation;
  conversation = { ...store.newConversation(), system };
  remember("");
  show();
  focusPrompt();
}

function remove(id) {
  const removed = find(id);
  if (!removed) return sidebar.show(conversation.id); // another tab was faster
  const draft = store.loadDraft(id);
  const wasShown = id === conversation.id;
  halt(id, { isRemoved: true });
  store.removeConversation(id);
  store.saveDraft(id, "");
  if (wasShown) startNew();
  else sidebar.show(conversation.id);
  sidebar.offerUndo(removed.title, () => {
    store.saveConversation(removed);
    store.saveDraft(id, draft);
    if (wasShown && !conversation.messages.length) open(id);
    else sidebar.show(conversation.id);
  });
}

function remember(id) {
  history.replaceState(null, "", id ? `#${id}` : location.pathname);
}

function save() {
  conversation.updated = Date.now();
  if (!store.saveConversation(conversation)) {
    const text = "The browser's storage is full, so this conversation is not saved. Export it, or delete other conversations.";
    composer.tell(text);
    say(text);
  }
  remember(conversation.id);
  sidebar.show(conversation.id);
}

// Asking

function submit() {
  const { text, attachments } = composer;
  if (composer.isReading) return composer.tell("Wait until the attachments have been read.");
  if (composer.isEmpty || runs.has(conversation.id) || isRefused()) return;
  composer.clear();
  composer.open(conversation.id);
  ask(text, attachments);
}

/** Whether a setting keeps a question from being sent; says which. */
function isRefused() {
  const problem = settings.problem();
  composer.tell(problem);
  return problem !== null;
}

/** versions: of the message, see versions.js. */
function ask(text, { images = [], media = [], files = [] }, versions) {
  if (!conversation.title) conversation.title = store.titleOf(text || [...images, ...media, ...files][0].name);
  const message = {
    role: "user",
    content: text,
    ...(images.length && { images }),
    ...(media.length && { media }),
    ...(files.length && { files }),
    ...(versions && { versions }),
  };
  conversation.messages.push(message);
  byId("welcome").hidden = true;
  byId("export-menu").hidden = false;
  document.title = `${conversation.title} · Octavo`;
  transcript.append(message);
  answer();
}

async function answer(versions) {
  const body = requestBody(conversation, models.chosen, settings.sampling());
  conversation.model = models.chosen;
  const message = { role: "assistant", content: "", reasoning: "", model: models.chosen, stats: {}, ending: "stopped" };
  message.limit = body.max_tokens ?? null;
  if (versions) message.versions = versions;
  conversation.messages.push(message);
  const index = conversation.messages.length - 1;
  transcript.append(message);
  transcript.wait(index);
  transcript.toEnd();
  const run = { conversation, message, index, controller: new AbortController(), progress: null, isRemoved: false };
  runs.set(conversation.id, run);
  showRunning();
  save();
  say("The model is answering.");
  try {
    await receiveWhenLoaded(run, body);
  } catch (error) {
    // A page that is being left may lose its connections first; then nothing of this happens but what halt does.
    if (error.status === 0) await new Promise((resolve) => setTimeout(resolve, LEAVING_MS));
    if (!run.controller.signal.aborted) fail(run, error);
  }
  end(run);
}

function fail({ message }, error) {
  message.error = describe(error);
  if (error.status !== 401) return;
  message.needsKey = true;
  settings.askForKey(message.error);
}

function end(run) {
  const { id, messages } = run.conversation;
  if (runs.get(id) === run) runs.delete(id);
  if (models.card?.state !== "loaded") models.refresh(); // the question has loaded it
  if (!run.isRemoved) store.saveConversation(run.conversation);
  // After a halt, another answer may be in its place.
  if (run.conversation === conversation && messages[run.index] === run.message) transcript.finish(run.index, run.message);
  showRunning();
  sidebar.show(conversation.id);
  say(run.message.error ?? "The answer is complete.");
}

/** Reads the answer. A model that is still being loaded is waited for, with its progress shown. */
async function receiveWhenLoaded(run, body) {
  const slow = setTimeout(() => models.refresh(), SLOW_MS);
  const { signal } = run.controller;
  const onChange = showerOf(run);
  try {
    for (;;) {
      try {
        return await receive(run.message, body, signal, onChange);
      } catch (error) {
        if (error.code !== "model_loading" || !(await models.loaded(body.model, signal))) throw error;
      }
    }
  } finally {
    clearTimeout(slow);
  }
}

/** A function that shows and saves what an answer has become, no more often than that is of use. */
function showerOf(run) {
  let isDrawn = true;
  let lastSave = performance.now();
  const draw = () => {
    isDrawn = true;
    if (run.conversation !== conversation || runs.get(conversation.id) !== run) return;
    transcript.update(run.index, run.message, run.progress);
    live.textContent = formatRate(run.message.stats).join("  ·  ");
  };
  return (progress) => {
    run.progress = progress;
    if (isDrawn) {
      isDrawn = false;
      requestAnimationFrame(draw);
    }
    const now = performance.now();
    if (now - lastSave > SAVE_INTERVAL_MS && !run.isRemoved) {
      lastSave = now;
      store.saveConversation(run.conversation);
    }
  };
}

function describe(error) {
  if (!(error instanceof ServerError)) return `Something went wrong on this page: ${error.message}`;
  return error.text;
}

/** Asks again with another API key. If the server takes it, the questions it refused need no key any more. */
async function tryKey() {
  if (!(await models.refresh())) return;
  const last = conversation.messages.at(-1);
  const isToAnswer = last?.needsKey ?? false;
  const refused = conversation.messages.filter(({ needsKey }) => needsKey);
  if (!refused.length) return;
  for (const message of refused) {
    delete message.needsKey;
    delete message.error;
  }
  save();
  if (isToAnswer) again(conversation.messages.length - 1);
  else show();
}

/** Ends the answer that is being written in a conversation; what it has so far stays. */
function halt(id = conversation.id, { isRemoved = false } = {}) {
  const run = runs.get(id);
  if (!run) return;
  run.message.ending = "stopped";
  run.isRemoved = isRemoved;
  if (!isRemoved) store.saveConversation(run.conversation);
  run.controller.abort();
  runs.delete(id);
  showRunning();
}

function act(action, target, button) {
  if (action === "copy-code") copy(target, button);
  else if (action === "copy") copy(conversation.messages[target].content, button);
  else if (action === "again") again(target);
  else if (action === "edit") edit(target);
  else if (action === "branch") branch(target);
  else if (action === "previous") turn(target, -1);
  else if (action === "next") turn(target, 1);
}

async function copy(text, button) {
  if (await copyText(text)) {
    confirmOn(button);
    say("Copied.");
  }
}

/** Answers again. The answer so far stays as another version. */
function again(index) {
  if (isRefused()) return;
  halt();
  const versions = setAside(conversation.messages, index);
  transcript.show(conversation.messages);
  answer(versions);
  focusPrompt();
}

/** Shows the version before or after the one on display. */
function turn(index, step) {
  halt();
  const { at } = conversation.messages[index].versions;
  turnTo(conversation.messages, index, at + step);
  save();
  transcript.show(conversation.messages, { index, action: step < 0 ? "previous" : "next" });
}

/** Opens a new conversation with all that came before this message, which becomes its draft. The old one stays as it is. */
function branch(index) {
  const { title, system, model, messages } = conversation;
  const { content, images, media, files } = messages[index];
  const copy = structuredClone(messages.slice(0, index));
  conversation = { ...store.newConversation(), title: store.branchTitle(title), system, model, messages: copy };
  store.saveDraft(conversation.id, content);
  save();
  show();
  composer.take({ images, media, files });
  focusPrompt();
}

function rename(id, title) {
  const renamed = id === conversation.id ? conversation : find(id);
  if (renamed) {
    renamed.title = title;
    store.saveConversation(renamed);
  } // else another tab has removed it
  sidebar.show(conversation.id);
  if (id === conversation.id) document.title = `${title} · Octavo`;
}

/** Turns a message into a field. The edited message becomes another version; nothing is lost. */
function edit(index) {
  const message = conversation.messages[index];
  transcript.edit(index, message, (text) => {
    if (text === null || (text === message.content && index < conversation.messages.length - 1) || isRefused()) return;
    halt();
    const versions = setAside(conversation.messages, index);
    transcript.show(conversation.messages);
    ask(text, message, versions);
    focusPrompt();
  });
}

// The page

function showRunning() {
  const isRunning = runs.has(conversation.id);
  send.hidden = isRunning;
  stop.hidden = !isRunning;
  send.disabled = composer.isEmpty;
  if (!isRunning) live.textContent = "";
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

const SHORTCUTS = {
  "shift+o": startNew,
  k: () => sidebar.search(),
  ",": () => settings.toggle(),
  "/": () => shortcuts.toggle(),
};

function onEscape() {
  if (byId("export-menu").open) {
    byId("export-menu").open = false;
    byId("export-menu").querySelector("summary").focus();
  } else if (runs.has(conversation.id)) {
    halt();
    focusPrompt();
  }
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !shortcuts.isOpen) onEscape();
  if (!event.ctrlKey && !event.metaKey) return;
  // On some layouts `/` needs Shift.
  const key = event.key === "/" ? "/" : `${event.shiftKey ? "shift+" : ""}${event.key.toLowerCase()}`;
  const shortcut = SHORTCUTS[key];
  if (!shortcut || (shortcuts.isOpen && key !== "/")) return;
  event.preventDefault();
  shortcut();
});
document.addEventListener("click", (event) => {
  if (!byId("export-menu").contains(event.target)) byId("export-menu").open = false;
});
addEventListener("pagehide", () => {
  for (const id of [...runs.keys()]) halt(id);
});

conversation = store.findConversation(location.hash.slice(1)) ?? conversation;
show();
models.refresh();
focusPrompt();
