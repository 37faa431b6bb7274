// All chats in one file: written for a backup or another browser, and read again.
import { byId, download } from "./dom.js";
import * as store from "./store.js";

const IMAGE_URL = /^data:image\/(jpeg|png|webp|gif|bmp);base64,[A-Za-z0-9+/=]*$/;
const MEDIA_URL = /^data:(application\/pdf|video\/(mp4|quicktime|webm));base64,[A-Za-z0-9+/=]*$/;

export class Library {
  #onImport;

  /** onImport(): chats or presets were added. */
  constructor({ onImport }) {
    this.#onImport = onImport;
    byId("export-all").addEventListener("click", () => this.#exportAll());
    byId("import").addEventListener("click", () => byId("import-files").click());
    byId("import-files").addEventListener("change", async (event) => {
      const files = [...event.target.files];
      event.target.value = "";
      const results = await Promise.all(files.map(importFile));
      this.#tell(results.join(" "));
      this.#onImport();
    });
  }

  #exportAll() {
    const conversations = store.allConversations();
    const body = { conversations, presets: store.loadPresets() };
    const day = new Date().toISOString().slice(0, 10);
    download(`octavo-chats-${day}.json`, "application/json", `${JSON.stringify(body, null, 1)}\n`);
    this.#tell(`Exported ${chats(conversations.length)}.`);
  }

  #tell(text) {
    byId("library-result").textContent = text;
  }
}

/** Adds the chats and presets of a file. Returns what happened, in words. */
async function importFile(file) {
  let entries, presets;
  try {
    const body = JSON.parse(await file.text());
    entries = Array.isArray(body) ? body : (body.conversations ?? [body]);
    presets = (body.presets ?? []).filter(isPreset);
    if (typeof body !== "object" || !Array.isArray(entries)) throw new TypeError("no list");
  } catch {
    return `${file.name} is not a file of exported chats.`;
  }
  const counts = { added: 0, known: 0, damaged: 0, full: 0 };
  for (const entry of entries) counts[importEntry(entry)]++;
  const own = store.loadPresets();
  const names = new Set(own.map(({ name }) => name));
  const added = [];
  for (const { name, text } of presets) {
    if (!names.has(name)) added.push({ name, text });
    names.add(name);
  }
  const areKept = !added.length || store.savePresets([...own, ...added]);
  const parts = [`Imported ${chats(counts.added)} from ${file.name}.`];
  if (counts.known) parts.push(`${chats(counts.known)} ${counts.known === 1 ? "was" : "were"} already here.`);
  const { damaged } = counts;
  if (damaged) parts.push(`Skipped ${damaged === 1 ? "1 entry that is not a chat" : `${damaged} entries that are not chats`}.`);
  if (counts.full) parts.push(`The browser's storage is full: ${chats(counts.full)} could not be saved.`);
  if (!areKept) parts.push("The browser's storage is full: the presets could not be saved.");
  return parts.join(" ");
}

function importEntry(entry) {
  let conversation;
  try {
    conversation = conversationOf(entry);
  } catch {
    return "damaged";
  }
  const present = store.findConversation(conversation.id);
  if (present && present.updated >= conversation.updated) return "known";
  return store.saveConversation(conversation) ? "added" : "full";
}

/** A conversation with nothing but the fields of one. Throws for what is not a conversation. */
function conversationOf({ id, title, model, system, messages, updated }) {
  const time = new Date(updated ?? Date.now()).getTime();
  return {
    id: /^[0-9a-f]{16}$/.test(id) ? id : store.newConversation().id,
    title: text(title),
    model: text(model),
    system: text(system),
    messages: messages.map(messageOf),
    updated: Number.isFinite(time) ? time : Date.now(),
  };
}

function messageOf({ role, content, images, media, files, reasoning, reasoning_content, versions, ...rest }) {
  if (!["user", "assistant"].includes(role) || typeof content !== "string") throw new TypeError("no message");
  const { model, ending, error, limit, truncated, stats } = rest;
  return {
    role,
    content,
    ...(images && { images: images.map(imageOf) }),
    ...(media && { media: media.map(mediumOf) }),
    ...(files && { files: files.map(fileOf) }),
    ...(role === "assistant" && {
      reasoning: text(reasoning ?? reasoning_content),
      model: text(model),
      ending: text(ending ?? "stop"),
      limit: number(limit),
      stats: { tokens: number(stats?.tokens), firstToken: number(stats?.firstToken), rate: number(stats?.rate) },
      ...(error && { error: text(error) }),
      ...(truncated && { truncated: number(truncated) }),
    }),
    ...(versions && { versions: versionsOf(versions) }),
  };
}

function versionsOf({ at, tails }) {
  const isRight = Number.isInteger(at) && tails.length > 1 && tails.every((tail, i) => (tail === null) === (i === at));
  if (!isRight || tails.some((tail) => tail?.length === 0)) throw new TypeError("no versions");
  return { at, tails: tails.map((tail) => tail && tail.map(messageOf)) };
}

function imageOf({ name, url }) {
  if (!IMAGE_URL.test(url)) throw new TypeError("no image");
  return { name: text(name), url };
}

function mediumOf({ name, url, pages, text: read }) {
  if (!MEDIA_URL.test(url)) throw new TypeError("no document or video");
  return { name: text(name), url, ...(pages && { pages: number(pages), text: read == null ? null : text(read) }) };
}

function fileOf({ name, text: content, pages }) {
  return { name: text(name), text: text(content), ...(pages && { pages: number(pages) }) };
}

function isPreset(preset) {
  return typeof preset?.name === "string" && typeof preset.text === "string" && preset.name.trim() !== "";
}

function text(value) {
  if (typeof (value ?? "") !== "string") throw new TypeError("no text");
  return value ?? "";
}

function number(value) {
  return Number.isFinite(value) ? value : null;
}

function chats(count) {
  return count === 1 ? "1 chat" : `${count} chats`;
}
