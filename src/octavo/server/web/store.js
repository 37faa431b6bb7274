// Conversations, kept in this browser: one entry of localStorage each, so that two tabs do not overwrite each other.

const PREFIX = "octavo.conversation.";
const DRAFT = "octavo.draft."; // of the tab: two tabs do not overwrite each other
const SETTINGS = "octavo.settings";
const PRESETS = "octavo.presets";

export function newConversation() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0"));
  return { id: id.join(""), title: "", model: "", system: "", messages: [], updated: Date.now() };
}

/** All conversations, the latest first. Entries that are damaged are left out. */
export function allConversations() {
  const found = [];
  for (const key of keys()) {
    if (!key.startsWith(PREFIX)) continue;
    const conversation = conversationAt(key);
    if (conversation) found.push(conversation);
  }
  return found.sort((a, b) => b.updated - a.updated);
}

export function findConversation(id) {
  return conversationAt(PREFIX + id);
}

/** False if the browser's storage is full or forbidden. */
export function saveConversation(conversation) {
  return write(PREFIX + conversation.id, conversation);
}

export function removeConversation(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // storage is forbidden: there is nothing to remove
  }
}

/** What was typed in a conversation, or before one began (id ""), and not sent. */
export function loadDraft(id) {
  try {
    return sessionStorage.getItem(DRAFT + id) ?? "";
  } catch {
    return "";
  }
}

export function saveDraft(id, text) {
  try {
    if (text) sessionStorage.setItem(DRAFT + id, text);
    else sessionStorage.removeItem(DRAFT + id);
  } catch {
    // storage is full or forbidden: the draft lasts as long as the page
  }
}

export function isConversationKey(key) {
  return key === null || key.startsWith(PREFIX);
}

export function loadSettings() {
  try {
    return parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    return {};
  }
}

export function saveSettings(settings) {
  return write(SETTINGS, settings);
}

export function loadPresets() {
  try {
    const presets = parse(localStorage.getItem(PRESETS));
    return Array.isArray(presets) ? presets : [];
  } catch {
    return [];
  }
}

export function savePresets(presets) {
  return write(PRESETS, presets);
}

/** The title of a branch: that of its conversation with a number that no other branch has. */
export function branchTitle(title) {
  const base = title.replace(/ \(branch(?: \d+)?\)$/, "");
  const taken = new Set(allConversations().map((conversation) => conversation.title));
  for (let number = 1; ; number++) {
    const wanted = number === 1 ? `${base} (branch)` : `${base} (branch ${number})`;
    if (!taken.has(wanted)) return wanted;
  }
}

export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

function keys() {
  try {
    return Object.keys(localStorage);
  } catch {
    return [];
  }
}

/** The conversation of a key; null if there is none, or it is damaged. */
function conversationAt(key) {
  try {
    const conversation = parse(localStorage.getItem(key));
    return Array.isArray(conversation?.messages) ? conversation : null;
  } catch {
    return null; // storage is forbidden
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
