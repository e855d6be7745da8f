/** Markdown as elements of the page. The text is a model's and never trusted: HTML in it is shown, links are checked. */

import { lexer } from "./marked.js";

const NAMES = { blockquote: "blockquote", paragraph: "p", strong: "strong", em: "em", del: "del", br: "br", hr: "hr" };
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0" };
const PROTOCOLS = ["https:", "http:", "mailto:"];

/** Show a text that grows: blocks that have not changed since the last call keep their elements. */
export class Markdown {
  #raws = [];

  constructor(element) {
    this.element = element;
  }

  /** `open`: more text will come, so marks that are still open at the end are closed for now. */
  show(text, open) {
    const all = lexer(open ? closed(text) : text), tokens = all.filter((token) => token.type !== "space" && token.type !== "def");
    if (Object.keys(all.links).length) this.#raws = []; // links to addresses that came later
    const raws = tokens.map((token) => token.raw);
    let same = 0;
    while (same < raws.length && raws[same] === this.#raws[same]) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    this.element.append(...nodes(tokens.slice(same)));
    this.#raws = raws;
  }
}

/** Close code and emphasis that are still open at the end; drop marks that no text follows. */
function closed(text) {
  const end = text.replace(/[\s*~`]+$/, ""), fences = end.match(/^ {0,3}(```|~~~)/gm) ?? [];
  if (fences.length % 2) return end; // inside code
  const last = end.slice(end.lastIndexOf("\n\n") + 1).replace(/`[^`]*`/g, "").replace(/^\s*\* /gm, "");
  if (last.includes("`")) return `${end}\``;
  const open = [];
  for (const [mark] of last.matchAll(/\*+(?=\S)|(?<=\S)\*+|~~/g)) {
    if (open.at(-1) === mark) open.pop();
    else open.push(mark);
  }
  return end + open.reverse().join("");
}

function create(name, ...children) {
  const element = document.createElement(name);
  element.append(...children);
  return element;
}

const nodes = (tokens) => tokens.filter((token) => token.type !== "space").map(node);

/** Return the node of a token: of a block, or of a part of one. */
function node(token) {
  switch (token.type) {
    case "heading": return create(`h${Math.min(6, token.depth + 2)}`, ...nodes(token.tokens));
    case "code": return code(token.text);
    case "codespan": return create("code", token.text);
    case "list": return list(token);
    case "table": return table(token);
    case "link": return link(token);
    case "checkbox": return document.createTextNode(token.checked ? "☑ " : "☐ ");
  }
  if (token.type in NAMES) return create(NAMES[token.type], ...nodes(token.tokens ?? []));
  if (token.tokens && token.type !== "image") return create("span", ...nodes(token.tokens));
  const text = ["text", "escape"].includes(token.type) ? token.text : token.raw;
  return document.createTextNode(text.replace(/&(amp|lt|gt|quot|#39|nbsp);/g, (entity) => ENTITIES[entity]));
}

function code(text) {
  const content = create("code", text), button = create("button", "Copy");
  button.type = "button";
  button.addEventListener("click", (event) => {
    event.stopPropagation(); // the answer around it may be a button, too
    getSelection().selectAllChildren(content);
    document.execCommand("copy"); // the newer clipboard interface is missing where the page has no HTTPS
    button.textContent = "Copied";
  });
  const frame = create("div", button, create("pre", content));
  frame.className = "code";
  return frame;
}

function list({ ordered, start, items }) {
  const element = create(ordered ? "ol" : "ul", ...items.map((item) => create("li", ...nodes(item.tokens))));
  if (ordered && start > 1) element.start = start;
  return element;
}

function table({ header, rows }) {
  const row = (cells, name) => create("tr", ...cells.map((cell) => {
    const element = create(name, ...nodes(cell.tokens));
    element.style.textAlign = cell.align ?? "";
    return element;
  }));
  return create("table", create("thead", row(header, "th")), create("tbody", ...rows.map((cells) => row(cells, "td"))));
}

/** A link in a new tab, or the bare text where its address is of another kind. */
function link({ href, raw, tokens }) {
  const address = URL.parse(href);
  if (!address || !PROTOCOLS.includes(address.protocol)) return document.createTextNode(raw);
  const element = create("a", ...nodes(tokens));
  Object.assign(element, { href: address.href, target: "_blank", rel: "noopener noreferrer nofollow" });
  return element;
}
