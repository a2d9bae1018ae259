// Markdown as nodes, never as HTML: whatever a model writes is text. Pictures are links, links lead to the web only.
//
// Linear in the length of the text: an answer is parsed again with each of its pieces.

const MOST_LINK = 2000; // characters of a link and its text
const MOST_DEPTH = 8; // of lists, quotes and emphasis; deeper ones are text
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:\*[ \t]*){3,}$|^ {0,3}(?:-[ \t]*){3,}$|^ {0,3}(?:_[ \t]*){3,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])[ \t]+(?=\S)/;
const DIVIDER = /^[ \t]*\|?(?:[ \t]*:?-+:?[ \t]*\|)+(?:[ \t]*:?-+:?[ \t]*)?$/;
const ESCAPED = /[!-/:-@[-`{-~]/;
const URL_TEXT = /^https?:\/\/[^\s<>"'`]+[^\s<>"'`.,;:!?)\]*_~]/;

export function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** Keeps an element's nodes equal to a Markdown text; blocks that did not change keep their nodes. */
export class Markdown {
  constructor(into) {
    this.into = into;
    this.sources = [];
  }

  update(text) {
    const found = blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"));
    const sources = found.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same += 1;
    while (this.into.childNodes.length > same) this.into.lastChild.remove();
    for (const block of found.slice(same)) this.into.append(rendered(block, 0));
    this.sources = sources;
  }
}

/** Top blocks of lines, each with its own lines: {kind, lines, …}. */
function blocks(lines) {
  const found = [];
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    const start = i;
    let match;
    if (!line.trim()) {
      i += 1;
    } else if ((match = FENCE.exec(line))) {
      const [, marks, language] = match;
      const end = new RegExp(`^ {0,3}${marks[0]}{${marks.length},} *$`);
      i += 1;
      while (i < lines.length && !end.test(lines[i])) i += 1;
      found.push({ kind: "code", language: language.trim().split(/\s/)[0], lines: lines.slice(start + 1, i) });
      i += 1;
    } else if ((match = HEADING.exec(line))) {
      found.push({ kind: `h${Math.min(6, match[1].length + 1)}`, lines: [match[2].replace(/ +#+ *$/, "")] });
      i += 1;
    } else if (RULE.test(line)) {
      found.push({ kind: "hr", lines: [] });
      i += 1;
    } else if (QUOTE.test(line)) {
      while (i < lines.length && QUOTE.test(lines[i])) i += 1;
      found.push({ kind: "blockquote", lines: lines.slice(start, i).map((each) => each.replace(QUOTE, "")) });
    } else if ((match = ITEM.exec(line))) {
      const { items, end } = listed(lines, i, /\d/.test(match[2]));
      found.push({ kind: /\d/.test(match[2]) ? "ol" : "ul", first: parseInt(match[2], 10) || 1, items });
      i = end;
    } else if (line.includes("|") && i + 1 < lines.length && DIVIDER.test(lines[i + 1])) {
      i += 2;
      while (i < lines.length && lines[i].includes("|")) i += 1;
      found.push({ kind: "table", lines: [line, ...lines.slice(start + 2, i)] });
    } else {
      i += 1;
      while (i < lines.length && lines[i].trim() && !begins(lines[i])) i += 1;
      found.push({ kind: "p", lines: lines.slice(start, i) });
    }
  }
  return found;
}

function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

/** Items of the list at `start`, each as its own lines without their indentation, and where the list ends. */
function listed(lines, start, ordered) {
  const items = [];
  const base = ITEM.exec(lines[start])[1].length;
  let i = start;
  let inside = 0; // columns of the current item's text
  while (i < lines.length) {
    const line = lines[i];
    const match = ITEM.exec(line);
    const indent = line.search(/\S/);
    if (match && match[1].length <= base + 1 && !RULE.test(line)) {
      if (match[1].length < base || /\d/.test(match[2]) !== ordered) break;
      inside = match[0].length;
      items.push([line.slice(inside)]);
    } else if (indent < 0) {
      if (i + 1 >= lines.length || lines[i + 1].search(/\S/) < Math.min(inside, base + 2) && !ITEM.test(lines[i + 1])) break;
      items.at(-1).push("");
    } else if (indent >= Math.min(inside, base + 2)) {
      items.at(-1).push(line.slice(Math.min(indent, inside)));
    } else if (!begins(line) && lines[i - 1].trim()) {
      items.at(-1).push(line.trim()); // a paragraph that goes on without indentation
    } else {
      break;
    }
    i += 1;
  }
  for (const item of items) while (item.length > 1 && !item.at(-1)) item.pop(); // lines between items
  return { items, end: i };
}

function rendered(block, depth) {
  if (depth > MOST_DEPTH) return element("p", (block.lines ?? block.items.flat()).join("\n"));
  const inner = (lines) => blocks(lines).map((each) => rendered(each, depth + 1));
  const { kind } = block;
  if (kind === "code") return code(block);
  if (kind === "table") return table(block.lines);
  const made = element(kind);
  if (kind === "blockquote") {
    made.append(...inner(block.lines));
  } else if (kind === "ol" || kind === "ul") {
    if (kind === "ol" && block.first !== 1) made.setAttribute("start", block.first);
    for (const lines of block.items) {
      const item = element("li");
      const nodes = inner(lines);
      const tight = nodes[0]?.nodeName === "P" && !lines.includes("");
      item.append(...(tight ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes));
      made.append(item);
    }
  } else if (kind !== "hr") {
    inline(made, block.lines.map((line) => line.trimStart()).join("\n"), depth);
  }
  return made;
}

function code({ language, lines }) {
  const text = lines.join("\n");
  const figure = element("figure", undefined, { class: "code" });
  const caption = element("figcaption");
  const copy = element("button", "Copy", { type: "button", "aria-label": `Copy ${language || "code"}` });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed here";
    }
  });
  caption.append(element("span", language || "code"), copy);
  const pre = element("pre", undefined, { tabindex: "0" });
  pre.append(element("code", text));
  figure.append(caption, pre);
  return figure;
}

function table(lines) {
  const made = element("table");
  lines.forEach((line, i) => {
    const row = element("tr");
    const cells = line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/);
    for (const text of cells) {
      const cell = element(i ? "td" : "th", undefined, i ? {} : { scope: "col" });
      inline(cell, text.trim().replaceAll("\\|", "|"), 0);
      row.append(cell);
    }
    made.append(row);
  });
  return made;
}

/** Append a paragraph's text with its emphasis, code and links. */
function inline(into, text, depth) {
  const missing = new Set(); // marks without a second one further on: asked once, not once per mark
  const find = (mark, from) => {
    if (missing.has(mark)) return -1;
    const at = text.indexOf(mark, from);
    if (at < 0) missing.add(mark);
    return at;
  };
  let plain = "";
  const flush = () => {
    if (plain) into.append(plain);
    plain = "";
  };
  const wrap = (name, part) => {
    flush();
    const made = element(name);
    inline(made, part, depth + 1);
    into.append(made);
  };
  let i = 0;
  while (i < text.length) {
    const c = text[i];
    if (c === "\\" && ESCAPED.test(text[i + 1] ?? "")) {
      plain += text[i + 1];
      i += 2;
      continue;
    }
    if (c === "`") {
      const marks = /^`+/.exec(text.slice(i, i + 64))[0];
      const end = find(marks, i + marks.length);
      if (end >= 0) {
        flush();
        into.append(element("code", text.slice(i + marks.length, end).replace(/^ (.+) $/s, "$1")));
        i = end + marks.length;
        continue;
      }
      plain += marks;
      i += marks.length;
      continue;
    }
    if ((c === "*" || c === "_" || c === "~") && depth < MOST_DEPTH) {
      const two = text[i + 1] === c;
      const mark = two ? c + c : c;
      const opens = /\S/.test(text[i + mark.length] ?? " ") && (c !== "_" || !/\w/.test(text[i - 1] ?? " "));
      const end = opens && (two || c !== "~") ? find(mark, i + mark.length + 1) : -1;
      if (end >= 0 && /\S/.test(text[end - 1]) && (c !== "_" || !/\w/.test(text[end + mark.length] ?? " "))) {
        wrap(c === "~" ? "del" : two ? "strong" : "em", text.slice(i + mark.length, end));
        i = end + mark.length;
        continue;
      }
      plain += mark;
      i += mark.length;
      continue;
    }
    if (c === "[" && depth < MOST_DEPTH) {
      const middle = find("](", i + 1);
      const end = middle < 0 ? -1 : find(")", middle + 2);
      const near = end >= 0 && end - i < MOST_LINK;
      const address = near ? text.slice(middle + 2, end).trim().split(/\s/)[0] : "";
      if (near && web(address)) {
        if (plain.endsWith("!")) plain = plain.slice(0, -1);
        flush();
        into.append(link(address, text.slice(i + 1, middle) || address));
        i = end + 1;
        continue;
      }
    }
    if (c === "h" && text.startsWith("http", i)) {
      const found = URL_TEXT.exec(text.slice(i, i + 2000));
      if (found && web(found[0])) {
        flush();
        into.append(link(found[0], found[0]));
        i += found[0].length;
        continue;
      }
    }
    if (c === "\n") {
      if (plain.endsWith("  ")) {
        plain = plain.trimEnd();
        flush();
        into.append(element("br"));
      } else {
        plain += "\n";
      }
      i += 1;
      continue;
    }
    plain += c;
    i += 1;
  }
  flush();
}

function web(address) {
  try {
    return ["http:", "https:", "mailto:"].includes(new URL(address).protocol);
  } catch {
    return false;
  }
}

function link(address, text) {
  return element("a", text, { href: address, target: "_blank", rel: "noopener noreferrer nofollow" });
}
