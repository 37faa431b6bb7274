// Markdown as models write it to nodes of the page: markdown-it parses, highlight.js colours, KaTeX writes formulas,
// DOMPurify lets through only what is listed here. HTML of a model stays text, and no picture is fetched.
import { element, icon } from "./dom.js";
import { formulas } from "./math.js";
import DOMPurify from "./vendor/dompurify.mjs";
import highlighter from "./vendor/highlight.mjs";
import MarkdownIt from "./vendor/markdown-it.mjs";

const MAX_HIGHLIGHTED = 20_000; // characters of code; longer code stays in one colour, so that streaming stays smooth
const TASK = /^\[([ xX])\] +/;
const BREAK = /<br *\/?>/iy;
const HTML_TAGS = [
  ..."a blockquote br code del em h1 h2 h3 h4 h5 h6 hr input li ol p pre s span strong table tbody td th thead tr ul".split(" "),
];
const MATH_TAGS = [
  ..."math semantics mrow mi mn mo mtext ms mspace msup msub msubsup munder mover munderover mfrac msqrt mroot".split(" "),
  ..."mtable mtr mtd mlabeledtr mpadded mphantom mstyle menclose mmultiscripts mprescripts mglyph".split(" "),
];
const HTML_ATTRIBUTES = ["href", "class", "start", "type", "disabled", "checked", "aria-label"];
const MATH_ATTRIBUTES = [
  ..."display mathvariant stretchy fence separator lspace rspace accent accentunder columnalign columnspacing".split(" "),
  ..."rowspacing columnlines rowlines scriptlevel displaystyle width height depth voffset notation mathcolor".split(" "),
  ..."mathbackground mathsize minsize maxsize linethickness movablelimits symmetric form".split(" "),
];
const ALLOWED = {
  ALLOWED_TAGS: [...HTML_TAGS, ...MATH_TAGS],
  ALLOWED_ATTR: [...HTML_ATTRIBUTES, ...MATH_ATTRIBUTES],
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

function lineBreakRule(state, silent) {
  BREAK.lastIndex = state.pos;
  const match = BREAK.exec(state.src);
  if (!match) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos += match[0].length;
  return true;
}

/** `- [x] done`: GitHub's task lists. */
function taskRule(state) {
  state.tokens.forEach((token, i) => {
    if (token.type !== "inline" || state.tokens[i - 2]?.type !== "list_item_open") return;
    const match = TASK.exec(token.content);
    const text = token.children[0];
    if (!match || text?.type !== "text") return;
    text.content = text.content.replace(TASK, "");
    const box = new state.Token("task", "input", 0);
    box.meta = { isDone: match[1] !== " " };
    token.children.unshift(box);
    state.tokens[i - 2].attrJoin("class", "task");
  });
}

function makeParser() {
  const markdown = new MarkdownIt({ html: false, linkify: true, maxNesting: 40 });
  markdown.validateLink = (url) => /^(https?:|mailto:)/i.test(url.trim());
  markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
  markdown.inline.ruler.before("autolink", "line_break", lineBreakRule);
  markdown.core.ruler.after("inline", "tasks", taskRule);
  const { rules } = markdown.renderer;
  const { escapeHtml } = markdown.utils;
  // A picture from elsewhere is only a link: the page loads nothing.
  rules.image = (tokens, i) => {
    const source = tokens[i].attrGet("src");
    return `<a href="${escapeHtml(source)}">${escapeHtml(tokens[i].content || source)}</a>`;
  };
  rules.task = (tokens, i) => `<input type="checkbox" aria-label="Task" disabled${tokens[i].meta.isDone ? " checked" : ""}>`;
  const cell = (tokens, i, options, env, renderer) => {
    const alignment = /text-align:(center|right)/.exec(tokens[i].attrGet("style"));
    tokens[i].attrs = alignment && [["class", `align-${alignment[1]}`]];
    return renderer.renderToken(tokens, i, options);
  };
  rules.th_open = rules.td_open = cell;
  markdown.use(formulas);
  return markdown;
}

const parser = makeParser();
const fenceFinder = new MarkdownIt("zero").enable("fence");
fenceFinder.core.ruler.enableOnly(["normalize", "block"]);

/** The nodes of tokens, with links that open elsewhere, tables that scroll and code that can be copied. */
function nodesOf(tokens, env) {
  const fragment = DOMPurify.sanitize(parser.renderer.render(tokens, parser.options, env), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = element("div", { className: "table", tabIndex: 0 });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.querySelector("code");
    const language = /(?:^| )language-(\S+)/.exec(code.className)?.[1] ?? "";
    pre.replaceWith(codeNode(code.textContent, language));
  }
  return fragment;
}

function codeNode(text, language) {
  const copy = element("button", { type: "button" }, icon("copy"), "Copy");
  copy.dataset.action = "copy-code";
  const head = element("div", { className: "code-head" }, element("span"), copy);
  const node = element("div", { className: "code" }, head, element("pre", { tabIndex: 0 }, element("code")));
  fillCode(node, text, language);
  return node;
}

function fillCode(node, text, language) {
  const code = text.replace(/\n$/, "");
  const name = language.slice(0, 30);
  node.querySelector(".code-head span").textContent = name || "text";
  const isKnown = code.length <= MAX_HIGHLIGHTED && highlighter.getLanguage(name);
  const coloured = isKnown
    ? DOMPurify.sanitize(highlighter.highlight(code, { language: name, ignoreIllegals: true }).value, ALLOWED)
    : code;
  node.querySelector("code").replaceChildren(coloured);
}

/** The top-level blocks of a text: { source, tokens }. */
function blocksOf(text, env) {
  const lines = text.split("\n");
  const blocks = [];
  let tokens = [];
  let depth = 0;
  for (const token of parser.parse(text, env)) {
    tokens.push(token);
    depth += token.nesting;
    if (depth > 0) continue;
    const [start, end] = tokens[0].map;
    blocks.push({ source: lines.slice(start, end).join("\n"), tokens });
    tokens = [];
  }
  return blocks;
}

/** Shows a text that grows: `update` touches only the blocks that have changed since the last call. */
export class MarkdownView {
  #root;
  #sources = [];
  #context = "";

  constructor(root) {
    this.#root = root;
  }

  update(text) {
    const env = {};
    const blocks = blocksOf(text.replace(/\r\n?/g, "\n"), env);
    const context = JSON.stringify(env.references ?? {}); // a link's target may follow long after its text
    if (context !== this.#context) this.#sources = [];
    this.#context = context;
    blocks.forEach((block, i) => {
      if (this.#sources[i] === block.source) return;
      const node = this.#root.children[i];
      const [token] = block.tokens;
      if (token.type === "fence" && node?.className === "code") {
        // The same node, so that its copy button keeps the focus while the code is being written.
        fillCode(node, token.content, token.info.trim().split(/\s+/)[0]);
      } else if (node) {
        node.replaceWith(nodesOf(block.tokens, env));
      } else {
        this.#root.append(nodesOf(block.tokens, env));
      }
      this.#sources[i] = block.source;
    });
    while (this.#root.children.length > blocks.length) this.#root.lastElementChild.remove();
    this.#sources.length = blocks.length;
  }
}

/** The nodes of what a person wrote: as typed, but for fenced code. */
export function typedNodes(text) {
  const lines = text.split("\n");
  const nodes = [];
  let done = 0;
  const keep = (end) => {
    const typed = lines.slice(done, end).join("\n");
    if (typed.trim()) nodes.push(element("div", { className: "typed" }, typed));
  };
  for (const token of fenceFinder.parse(text, {})) {
    if (token.type !== "fence") continue;
    keep(token.map[0]);
    nodes.push(codeNode(token.content, token.info.trim().split(/\s+/)[0]));
    done = token.map[1];
  }
  keep(lines.length);
  return nodes;
}
