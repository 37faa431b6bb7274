// A conversation as a file.
import { fenced } from "./attachments.js";
import { download } from "./dom.js";

export function exportJson(conversation) {
  const { title, model, system, messages, updated } = conversation;
  const cleaned = messages.map(({ role, content, images, media, files, reasoning, stats, model: answeredBy }) => ({
    role,
    content,
    ...(images && { images }),
    ...(media && { media }),
    ...(files && { files }),
    ...(reasoning && { reasoning_content: reasoning }),
    ...(answeredBy && { model: answeredBy }),
    ...(stats && { stats }),
  }));
  const body = { title, model, updated: new Date(updated).toISOString(), system: system || null, messages: cleaned };
  download(`${filename(conversation)}.json`, "application/json", `${JSON.stringify(body, null, 2)}\n`);
}

export function exportMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  if (conversation.system) parts.push(`> **System:** ${conversation.system.replace(/\n/g, "\n> ")}`);
  for (const message of conversation.messages) {
    parts.push(message.role === "user" ? "## You" : `## ${message.model || conversation.model || "Assistant"}`);
    const seen = [...(message.images ?? []), ...(message.media ?? [])].map(({ name }) => `*${name}*`);
    parts.push(...seen, message.content, ...(message.files ?? []).map(fenced));
  }
  download(`${filename(conversation)}.md`, "text/markdown", `${parts.join("\n\n")}\n`);
}

function filename(conversation) {
  const name = conversation.title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `octavo-${name.slice(0, 40) || "conversation"}`;
}
