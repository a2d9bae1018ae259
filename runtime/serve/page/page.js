// The page at /: conversations with the model behind this server, and what its cache holds.

import { Markdown, element } from "./markdown.js";
import * as server from "./server.js";
import { Talks, fresh, sent } from "./talks.js";

const DEFAULTS = { temperature: 0.8, top_p: 0.95, top_k: 40, max_tokens: "" };
const SAMPLING = "subkv.sampling";
const MIB = 2 ** 20;
const $ = (id) => document.getElementById(id);

let talks;
let talk = fresh();
let properties = null; // of the server: /props
let files = []; // of the message being written
let work = null; // the answer under way: {abort, shown, message, n}
let editing = -1; // index of the message that is written anew

const number = (n) => Math.round(n).toLocaleString("en");
const mib = (bytes) => `${(bytes / MIB).toFixed(bytes < 10 * MIB ? 2 : 1)} MiB`;
const say = (text) => ($("status").textContent = text);
const sampling = () => ({ ...DEFAULTS, ...JSON.parse(localStorage.getItem(SAMPLING) ?? "{}") });

//
// the gauge
//

/** n: tokens of the conversation that the cache holds. timings: the server's, of the last answer. */
function gauge(n, timings) {
  if (!properties) return;
  const { n_ctx } = properties.default_generation_settings;
  const { kv_cache } = properties;
  const per = (bytes) => (bytes / kv_cache.n_cells) * n;
  $("used").value = Math.min(1, n / n_ctx);
  $("used").setAttribute("aria-valuetext", `${number(n)} of ${number(n_ctx)} tokens`);
  $("tokens").textContent = `${number(n)} of ${number(n_ctx)}`;
  const bits = `${kv_cache.bits.toFixed(2)} bits`;
  const size = n ? `${mib(per(kv_cache.bytes))}, f16 ${mib(per(kv_cache.bytes_f16))}` : "empty";
  $("kv").textContent = `${size} (${kv_cache.type}, ${bits})`;
  $("prompt").textContent = timings
    ? `${number(timings.cache_n)} restored, ${number(timings.prompt_n)} evaluated at ${number(timings.prompt_per_second)}/s`
    : "–";
  $("speed").textContent = timings ? `${timings.predicted_per_second.toFixed(1)} tokens/s` : "–";
}

function held(timings) {
  return timings ? timings.cache_n + timings.prompt_n + timings.predicted_n : 0;
}

function show_gauge() {
  const timings = talk.messages.findLast((message) => message.timings)?.timings;
  gauge(held(timings), timings);
}

//
// the conversation
//

function button(text, action, attributes = {}) {
  const made = element("button", text, { type: "button", ...attributes });
  made.addEventListener("click", action);
  return made;
}

/** The list item of a message; its text is kept up to date through `update`. */
function item(message, index) {
  const made = element("li", undefined, { class: message.role });
  const text = element("div", undefined, { class: "text" });
  const actions = element("div", undefined, { class: "actions" });
  made.append(element("p", message.role === "user" ? "You" : "Model", { class: "who" }));
  for (const file of message.files ?? []) made.append(element("p", `${file.name}, ${number(file.text.length)} characters`, { class: "note" }));
  made.append(text, actions);
  const markdown = message.role === "user" ? null : new Markdown(text);
  const update = () => {
    if (markdown) markdown.update(message.content);
    else text.textContent = message.content;
  };
  const finish = () => {
    update();
    actions.replaceChildren();
    if (message.error) actions.append(element("span", message.error, { class: "error" }));
    if (message.role === "user") actions.append(button("Edit", () => edit(index)));
    else actions.append(button("Copy", () => copy(message.content)));
    if (message.role !== "user" && index === talk.messages.length - 1) {
      actions.append(button("Regenerate", regenerate, { "aria-keyshortcuts": "Alt+R", title: "Alt+R" }));
    }
    if (message.stopped) actions.append(element("span", "stopped", { class: "note" }));
  };
  return { made, update, finish };
}

function show_talk() {
  $("log").replaceChildren();
  talk.messages.forEach((message, index) => {
    const shown = item(message, index);
    shown.finish();
    $("log").append(shown.made);
  });
  $("log").scrollTop = $("log").scrollHeight;
  show_gauge();
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    say("The browser does not allow copying here.");
  }
}

async function show_list() {
  const found = await talks.all();
  const lines = found.map((each) => {
    const line = element("li");
    const title = each.title || "Untitled";
    const current = each.id === talk.id ? { "aria-current": "true" } : {};
    line.append(
      button(title, () => open_talk(each), current),
      button("×", () => remove(each), { "aria-label": `Delete ${title}`, title: "Delete" }),
    );
    return line;
  });
  $("talks").replaceChildren(...lines);
}

async function keep() {
  if (!talk.messages.length) return;
  talk.title ||= (talk.messages[0].content || talk.messages[0].files[0].name).slice(0, 60);
  try {
    await talks.put(talk);
  } catch (error) {
    say(`This conversation could not be kept: ${error.message}`);
  }
  await show_list();
}

async function open_talk(other) {
  stop();
  await work?.ended;
  talk = other;
  editing = -1;
  toggle_menu(false);
  say("");
  show_talk();
  await show_list();
  $("words").focus();
}

async function remove(other) {
  if (!confirm(`Delete "${other.title}"?`)) return;
  await talks.remove(other.id);
  if (other.id === talk.id) await open_talk(fresh());
  else await show_list();
}

//
// asking
//

function busy(now) {
  $("stop").hidden = !now;
  $("send").disabled = now;
  $("log").setAttribute("aria-busy", String(now));
}

function stop() {
  work?.abort.abort();
}

/** While the prompt is read: how far, where the server is at work for nobody else. */
async function follow_prompt(current) {
  while (work === current && !current.n) {
    await new Promise((resolve) => setTimeout(resolve, 1000));
    if (work !== current || current.n) return;
    try {
      const [slot, ...others] = (await server.slots()).filter((each) => each.is_processing);
      const part = slot && !others.length && slot.n_prompt_tokens ? `${number(Math.min(slot.n_tokens, slot.n_prompt_tokens))} of ${number(slot.n_prompt_tokens)} tokens` : "";
      if (work === current && !current.n) say(`Reading the prompt … ${part}`);
    } catch {
      return;
    }
  }
}

async function answer() {
  const message = { role: "assistant", content: "" };
  const request = { messages: sent(talk), ...sampling() };
  if (request.max_tokens === "") delete request.max_tokens;
  const asked_by = talk;
  talk.messages.push(message);
  const shown = item(message, talk.messages.length - 1);
  $("log").append(shown.made);
  $("log").scrollTop = $("log").scrollHeight;
  let done;
  const current = { abort: new AbortController(), n: 0, ended: new Promise((resolve) => (done = resolve)) };
  work = current;
  busy(true);
  say("Reading the prompt …");
  follow_prompt(current);
  let drawing = false;
  const draw = () => {
    drawing = false;
    const log = $("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    shown.update();
    if (follows) log.scrollTop = log.scrollHeight;
  };
  try {
    for await (const event of server.chat(request, current.abort.signal)) {
      const piece = event.choices[0]?.delta?.content;
      if (piece) {
        current.n += 1;
        if (current.n === 1) say("Answering …");
        message.content += piece;
        if (!drawing) requestAnimationFrame(draw);
        drawing = true;
      }
      if (event.timings) message.timings = event.timings;
    }
    say(`Done: ${number(message.timings?.predicted_n ?? current.n)} tokens.`);
  } catch (error) {
    if (error.name === "AbortError") {
      message.stopped = true;
      say("Stopped.");
    } else {
      message.error = error.status ? error.message : `No answer from the server: ${error.message}`;
      say(message.error);
      if (error.status === 401) ask_key(error.message);
    }
  } finally {
    work = null;
    busy(false);
    if (!message.content && !message.timings && !message.error) asked_by.messages.pop();
    if (talk === asked_by) {
      show_talk();
      await keep();
    }
    done();
  }
}

async function send() {
  const words = $("words").value;
  if (work || !(words.trim() || files.length)) return;
  if (editing >= 0) talk.messages.length = editing;
  editing = -1;
  talk.messages.push({ role: "user", content: words, files });
  $("words").value = "";
  files = [];
  show_files();
  show_talk();
  await keep();
  await answer();
}

async function regenerate() {
  if (work || talk.messages.at(-1)?.role !== "assistant") return;
  talk.messages.pop();
  show_talk();
  await answer();
}

function edit(index) {
  if (work) return;
  editing = index;
  $("words").value = talk.messages[index].content;
  files = [...(talk.messages[index].files ?? [])];
  show_files();
  say("Sending it replaces this message and what follows. Escape keeps them.");
  $("words").focus();
}

//
// files
//

async function add_files(list) {
  for (const file of list) {
    const most = properties?.max_body ?? 8 * MIB;
    if (file.size > most) {
      say(`${file.name}: expected at most ${mib(most)}, found ${mib(file.size)}.`);
      continue;
    }
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new TypeError("binary");
      const added = { name: file.name, text };
      files.push(added);
      show_files();
      added.n = await server.count(text);
    } catch (error) {
      say(error instanceof TypeError ? `${file.name}: expected a text in UTF-8, found something else.` : error.message);
    }
  }
  show_files();
}

function show_files() {
  const n_ctx = properties?.default_generation_settings.n_ctx ?? Infinity;
  const lines = files.map((file, i) => {
    const line = element("li");
    const size = file.n === undefined ? `${number(file.text.length)} characters` : `${number(file.n)} tokens`;
    const over = file.n >= n_ctx ? `, more than the context of ${number(n_ctx)}` : "";
    line.append(element("span", `${file.name}, ${size}${over}`, over ? { class: "error" } : {}));
    line.append(button("×", () => (files.splice(i, 1), show_files()), { "aria-label": `Remove ${file.name}` }));
    return line;
  });
  $("files").replaceChildren(...lines);
}

//
// settings
//

function ask_key(message) {
  open_settings();
  $("asked").textContent = message;
  $("key").focus();
}

function open_settings() {
  const now = sampling();
  for (const name of Object.keys(DEFAULTS)) $(name).value = now[name];
  $("system").value = talk.system;
  $("key").value = server.key.get();
  $("asked").textContent = "";
  if (!$("dialog").open) $("dialog").showModal();
}

async function close_settings() {
  $("words").focus();
  const now = {};
  for (const [name, value] of Object.entries(DEFAULTS)) {
    const given = $(name);
    now[name] = given.value === "" || !given.checkValidity() ? value : Number(given.value);
  }
  localStorage.setItem(SAMPLING, JSON.stringify(now));
  const changed = talk.system !== $("system").value;
  talk.system = $("system").value;
  const key = $("key").value;
  server.key.set(key);
  if (changed) await keep();
  if (!properties) await connect();
}

async function connect() {
  say("Waiting for the server …");
  try {
    properties = await server.properties();
    $("model").textContent = properties.model_alias;
    document.title = properties.model_alias;
    say("");
    show_gauge();
  } catch (error) {
    say(error.status ? error.message : `No answer from the server: ${error.message}`);
    if (error.status === 401) ask_key(error.message);
  }
}

function toggle_menu(open) {
  $("side").classList.toggle("open", open);
  $("menu").setAttribute("aria-expanded", String(open));
}

//
// events
//

$("form").addEventListener("submit", (event) => (event.preventDefault(), send()));
$("words").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", () => open_talk(fresh()));
$("settings").addEventListener("click", open_settings);
$("dialog").addEventListener("close", close_settings);
$("menu").addEventListener("click", () => toggle_menu(!$("side").classList.contains("open")));
$("file").addEventListener("change", async (event) => {
  await add_files(event.target.files);
  event.target.value = "";
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("dialog").open) {
    stop();
    toggle_menu(false);
    if (editing >= 0) {
      editing = -1;
      $("words").value = "";
      files = [];
      show_files();
      say("");
    }
  }
  if (event.altKey && event.code === "KeyN") open_talk(fresh());
  if (event.altKey && event.code === "KeyR") regenerate();
});
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    $("form").classList.toggle("over", name === "dragover");
    if (name === "drop") add_files(event.dataTransfer.files);
  });
}

talks = await Talks.open();
if (!talks.database) $("kept").textContent = "This browser keeps nothing: conversations end with the page.";
await show_list();
await connect();
