// Runs pipelines of transformers.js in a browser, by wasm, from a server that has its packages and the models.
import * as transformers from "/node_modules/@huggingface/transformers/dist/transformers.js";
import { results } from "/clients/jobs.mjs";

const { env } = transformers;
env.allowRemoteModels = false;
env.allowLocalModels = true;
env.localModelPath = "/models/";
env.useBrowserCache = env.useWasmCache = false;
env.backends.onnx.wasm.wasmPaths = "/node_modules/onnxruntime-web/dist/";
window.called = (jobs) => results(transformers, jobs);
