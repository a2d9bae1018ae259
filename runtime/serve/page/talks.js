// Conversations in the browser's own database: {id, title, system, messages, changed}; they never leave it.
//
// A message: {role, content, files: [{name, text}], timings, error}.

const NAME = "subkv";
const STORE = "talks";

export class Talks {
  constructor(database) {
    this.database = database; // null: kept until the page is closed
    this.memory = new Map();
  }

  /** Where the browser gives no database (some private windows), conversations live as long as the page. */
  static async open() {
    try {
      const asked = indexedDB.open(NAME, 1);
      asked.onupgradeneeded = () => asked.result.createObjectStore(STORE, { keyPath: "id" });
      return new Talks(await settled(asked));
    } catch {
      return new Talks(null);
    }
  }

  /** Newest first. */
  async all() {
    const found = this.database ? await settled(this.#store("readonly").getAll()) : [...this.memory.values()];
    return found.sort((a, b) => b.changed - a.changed);
  }

  async put(talk) {
    talk.changed = Date.now();
    this.memory.set(talk.id, talk);
    if (this.database) await settled(this.#store("readwrite").put(talk));
  }

  async remove(id) {
    this.memory.delete(id);
    if (this.database) await settled(this.#store("readwrite").delete(id));
  }

  #store(mode) {
    return this.database.transaction(STORE, mode).objectStore(STORE);
  }
}

export function fresh() {
  return { id: crypto.randomUUID?.() ?? String(Math.random()), title: "", system: "", messages: [], changed: Date.now() };
}

/** What the server is sent: files first, since a question changes more often than what it is about. */
export function sent(talk) {
  const system = talk.system.trim() ? [{ role: "system", content: talk.system }] : [];
  const messages = talk.messages.filter((message) => message.content || message.files?.length);
  return [
    ...system,
    ...messages.map(({ role, content, files }) => ({
      role,
      content: [...(files ?? []).map(({ name, text }) => `${name}:\n\n${text}\n\n`), content].join(""),
    })),
  ];
}

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("another page holds the database"));
  });
}
