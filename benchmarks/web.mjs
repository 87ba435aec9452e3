// Runs a model by onnxruntime-web, by wasm. In Node: node web.mjs FOLDER_OF_NODE_MODULES FOLDER, which prints the results;
// a browser calls results().

const ARRAYS = { float32: Float32Array, int64: BigInt64Array, int32: Int32Array, bool: Uint8Array };

/** The results of model.onnx as JSON: lists of numbers. read() gives a file's bytes; feed.json says what its inputs are. */
export async function results(ort, read) {
  ort.env.wasm.numThreads = 1;
  const session = await ort.InferenceSession.create(await read("model.onnx"), { executionProviders: ["wasm"] });
  const feed = {};
  for (const { name, type, dims, file } of JSON.parse(new TextDecoder().decode(await read("feed.json")))) {
    feed[name] = new ort.Tensor(type, new ARRAYS[type]((await read(file)).buffer), dims);
  }
  const found = await session.run(feed);
  return JSON.stringify(session.outputNames.map((name) => Array.from(found[name].data, Number)));
}

if (typeof process !== "undefined") {
  const { readFile } = await import("node:fs/promises");
  const { pathToFileURL } = await import("node:url");
  const [modules, folder] = process.argv.slice(2);
  const ort = await import(pathToFileURL(`${modules}/onnxruntime-web/dist/ort.node.min.mjs`).href);
  console.log(await results(ort, async (name) => Uint8Array.from(await readFile(`${folder}/${name}`))));
}
