// Markdown as models write it (a subset of CommonMark and GitHub's tables and task lists) to nodes of the page.
// Text only ever becomes text nodes: nothing a model writes is parsed as HTML, and no picture is fetched.
import { inlineNodes } from "./inline.js";
import { element, icon } from "./dom.js";

const MAX_DEPTH = 12;
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*))?$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const MARKER = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const TABLE_RULE = /^ {0,3}\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
const TASK = /^\[([ xX])\] +/;

/** The blocks of a text, each with its source, so that a growing text keeps the nodes of what has not changed. */
export function parseBlocks(lines, depth = 0) {
  const blocks = [];
  let i = 0;
  while (i < lines.length) {
    if (!lines[i].trim()) {
      i++;
      continue;
    }
    const [block, end] = readBlock(lines, i, depth);
    block.source = lines.slice(i, end).join("\n");
    blocks.push(block);
    i = end;
  }
  return blocks;
}

function readBlock(lines, i, depth) {
  const line = lines[i];
  let match;
  if ((match = FENCE.exec(line))) return readFence(lines, i, match);
  if ((match = HEADING.exec(line))) {
    return [{ type: "heading", level: match[1].length, text: stripClosingHashes(match[2] ?? "") }, i + 1];
  }
  if (RULE.test(line)) return [{ type: "rule" }, i + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return readQuote(lines, i, depth);
  if (depth < MAX_DEPTH && MARKER.test(line)) return readList(lines, i, depth);
  if (startsTable(lines, i)) return readTable(lines, i);
  return readParagraph(lines, i);
}

function stripClosingHashes(text) {
  const trimmed = text.trimEnd();
  let end = trimmed.length;
  while (end > 0 && trimmed[end - 1] === "#") end--;
  return end === 0 || trimmed[end - 1] === " " ? trimmed.slice(0, end).trimEnd() : trimmed;
}

function readFence(lines, start, match) {
  const fence = match[1];
  const indent = lines[start].length - lines[start].trimStart().length;
  const content = [];
  let i = start + 1;
  for (; i < lines.length; i++) {
    const trimmed = lines[i].trim();
    if (trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length)) {
      i++;
      break;
    }
    content.push(lines[i].slice(Math.min(indent, lines[i].length - lines[i].trimStart().length)));
  }
  return [{ type: "code", language: match[2].trim().split(" ")[0].slice(0, 30), text: content.join("\n") }, i];
}

function readQuote(lines, start, depth) {
  const content = [];
  let i = start;
  while (i < lines.length && QUOTE.test(lines[i])) content.push(lines[i++].replace(QUOTE, ""));
  return [{ type: "quote", blocks: parseBlocks(content, depth + 1) }, i];
}

function readList(lines, start, depth) {
  const first = MARKER.exec(lines[start]);
  const isOrdered = /\d/.test(first[2]);
  const base = first[1].length;
  const items = [];
  let content = null;
  let inner = 0;
  let i = start;
  for (; i < lines.length; i++) {
    const line = lines[i];
    const indent = line.length - line.trimStart().length;
    const marker = MARKER.exec(line);
    if (marker && indent <= base + 1 && !RULE.test(line)) {
      if (/\d/.test(marker[2]) !== isOrdered) break;
      content = [line.slice(marker[0].length)];
      items.push(content);
      inner = Math.max(base + 2, marker[0].trimEnd().length + 1);
    } else if (!line.trim()) {
      if (i + 1 < lines.length && !continuesList(lines[i + 1], base, isOrdered)) break;
      content.push("");
    } else if (indent >= base + 2 || (lines[i - 1].trim() && !startsBlock(lines, i))) {
      content.push(line.slice(Math.min(indent, inner)));
    } else {
      break;
    }
  }
  const firstNumber = isOrdered ? parseInt(first[2], 10) : 1;
  const parsed = items.map((item) => {
    const task = TASK.exec(item[0]);
    if (task) item[0] = item[0].slice(task[0].length);
    return { task: task ? task[1] !== " " : null, blocks: parseBlocks(item, depth + 1) };
  });
  return [{ type: "list", isOrdered, first: firstNumber, items: parsed }, i];
}

function continuesList(line, base, isOrdered) {
  const indent = line.length - line.trimStart().length;
  const marker = MARKER.exec(line);
  return !line.trim() || indent >= base + 2 || (marker !== null && /\d/.test(marker[2]) === isOrdered);
}

function startsTable(lines, i) {
  return lines[i].includes("|") && i + 1 < lines.length && lines[i + 1].includes("-") && TABLE_RULE.test(lines[i + 1]);
}

function readTable(lines, start) {
  const head = splitRow(lines[start]);
  const alignments = splitRow(lines[start + 1]).map((cell) => {
    if (!cell.endsWith(":")) return "left";
    return cell.startsWith(":") ? "center" : "right";
  });
  const rows = [];
  let i = start + 2;
  while (i < lines.length && lines[i].includes("|") && lines[i].trim()) rows.push(splitRow(lines[i++]));
  return [{ type: "table", head, alignments, rows }, i];
}

function splitRow(line) {
  const cells = [];
  let cell = "";
  const text = line.trim();
  for (let i = 0; i < text.length; i++) {
    if (text[i] === "\\" && text[i + 1] === "|") {
      cell += "|";
      i++;
    } else if (text[i] === "|") {
      if (i > 0) cells.push(cell.trim());
      cell = "";
    } else {
      cell += text[i];
    }
  }
  if (cell.trim() || !text.endsWith("|")) cells.push(cell.trim());
  return cells;
}

function startsBlock(lines, i) {
  const line = lines[i];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || MARKER.test(line);
}

function readParagraph(lines, start) {
  let i = start + 1;
  while (i < lines.length && lines[i].trim() && !startsBlock(lines, i) && !startsTable(lines, i)) i++;
  return [{ type: "paragraph", text: lines.slice(start, i).map((line) => line.trimStart()).join("\n") }, i];
}

function nodeOf(block) {
  switch (block.type) {
    case "heading":
      return element(`h${block.level}`, {}, ...inlineNodes(block.text));
    case "rule":
      return element("hr");
    case "code":
      return codeNode(block);
    case "quote":
      return element("blockquote", {}, ...block.blocks.map(nodeOf));
    case "list":
      return listNode(block);
    case "table":
      return tableNode(block);
    default:
      return element("p", {}, ...inlineNodes(block.text));
  }
}

function listNode(block) {
  const list = element(block.isOrdered ? "ol" : "ul");
  if (block.isOrdered && block.first !== 1) list.start = block.first;
  for (const item of block.items) {
    const node = element("li");
    if (item.task !== null) {
      node.className = "task";
      node.append(element("input", { type: "checkbox", disabled: true, checked: item.task, ariaLabel: "Task" }));
    }
    const isLoose = item.blocks.filter((inner) => inner.type === "paragraph").length > 1;
    for (const inner of item.blocks) {
      if (inner.type === "paragraph" && !isLoose) node.append(...inlineNodes(inner.text));
      else node.append(nodeOf(inner));
    }
    list.append(node);
  }
  return list;
}

function tableNode(block) {
  const cellNode = (tag, text, column) => {
    const cell = element(tag, {}, ...inlineNodes(text));
    const alignment = block.alignments[column] ?? "left";
    if (alignment !== "left") cell.className = `align-${alignment}`;
    return cell;
  };
  const head = element("tr", {}, ...block.head.map((text, column) => cellNode("th", text, column)));
  const rows = block.rows.map((cells) =>
    element("tr", {}, ...block.head.map((_, column) => cellNode("td", cells[column] ?? "", column))),
  );
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
  return element("div", { className: "table", tabIndex: 0 }, table);
}

function codeNode(block) {
  const code = element("code", {}, block.text);
  const copy = element("button", { type: "button" }, icon("copy"), "Copy");
  copy.dataset.action = "copy-code";
  const head = element("div", { className: "code-head" }, element("span", {}, block.language || "text"), copy);
  return element("div", { className: "code" }, head, element("pre", { tabIndex: 0 }, code));
}

/** Shows a text that grows: `update` touches only what has changed since the last call. */
export class MarkdownView {
  #root;
  #sources = [];
  #types = [];

  constructor(root) {
    this.#root = root;
  }

  update(text) {
    const blocks = parseBlocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"));
    blocks.forEach((block, i) => {
      const node = this.#root.children[i];
      if (this.#sources[i] === block.source) return;
      if (node && block.type === "code" && this.#types[i] === "code") {
        // The same node, so that its copy button keeps the focus while the code is being written.
        node.querySelector("code").textContent = block.text;
        node.querySelector(".code-head span").textContent = block.language || "text";
      } else if (node) {
        node.replaceWith(nodeOf(block));
      } else {
        this.#root.append(nodeOf(block));
      }
      this.#sources[i] = block.source;
      this.#types[i] = block.type;
    });
    while (this.#root.children.length > blocks.length) this.#root.lastElementChild.remove();
    this.#sources.length = this.#types.length = blocks.length;
  }
}
