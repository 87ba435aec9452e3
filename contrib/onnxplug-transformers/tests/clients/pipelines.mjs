// Runs pipelines of transformers.js: jobs as JSON on standard input, their results on standard output.
// node pipelines.mjs FOLDER_OF_MODELS FOLDER_OF_NODE_MODULES
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [models, modules] = process.argv.slice(2);
const file = `${modules}/@huggingface/transformers/dist/transformers.node.mjs`;
const { env, pipeline, RawImage, Tensor } = await import(pathToFileURL(file).href);
env.allowRemoteModels = false;
env.localModelPath = models;

function argument(value) {
  if (value?.image) return new RawImage(Uint8ClampedArray.from(value.image.flat(2)), value.image[0].length, value.image.length, 3);
  if (value?.sound) return Float32Array.from(value.sound);
  return value;
}

function plain(value) {
  if (value instanceof Tensor) return value.tolist();
  return value;
}

const results = [];
for (const { task, model, options, args } of JSON.parse(readFileSync(0, "utf8"))) {
  const run = await pipeline(task, model, options);
  results.push(plain(await run(...args.map(argument))));
}
console.log(JSON.stringify(results, (_, value) => (typeof value === "bigint" ? Number(value) : value)));
