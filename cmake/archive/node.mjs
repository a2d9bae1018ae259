// GGML_BACKEND_PATH=/opt/subkv/libggml-subkv.so SUBKV=auto node node.mjs model.gguf
import { getLlama, LlamaChatSession } from "node-llama-cpp";

const llama = await getLlama();
const model = await llama.loadModel({ modelPath: process.argv[2], gpuLayers: 99 }); // all layers on the device SUBKV
const context = await model.createContext({ contextSize: 8192, flashAttention: true });
const session = new LlamaChatSession({ contextSequence: context.getSequence() });
console.log(await session.prompt("What is the capital of France?"));
