// What the page asks of the server it came from.

const KEY = "subkv.key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** The answer's Response. Throws Refused with the server's own sentence. */
async function asked(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  const options = body === undefined ? { headers, signal } : { method: "POST", headers, signal, body: JSON.stringify(body) };
  const answer = await fetch(path, options);
  if (answer.ok) return answer;
  let message = `${answer.status} ${answer.statusText}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // not one of ours
  }
  throw new Refused(answer.status, message);
}

export const properties = async () => (await asked("props")).json();
export const slots = async () => (await asked("slots")).json();
export const count = async (text) => (await (await asked("extras/tokenize/count", { input: text })).json()).count;

/** Pieces of an answer as the server sends them: parsed events. Throws Refused, AbortError. */
export async function* chat(request, signal) {
  const answer = await asked("v1/chat/completions", { ...request, stream: true }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        const data = line.slice(6);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Refused(event.error.code ?? 500, event.error.message);
        yield event;
      }
    }
    throw new Refused(0, "The server ended the answer before its end.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
