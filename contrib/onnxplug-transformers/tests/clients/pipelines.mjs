// Runs pipelines of transformers.js in Node: jobs as JSON on standard input, their results on standard output.
// node pipelines.mjs FOLDER_OF_MODELS FOLDER_OF_NODE_MODULES
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { results } from "./jobs.mjs";

const [models, modules] = process.argv.slice(2);
const file = `${modules}/@huggingface/transformers/dist/transformers.node.mjs`;
const transformers = await import(pathToFileURL(file).href);
transformers.env.allowRemoteModels = false;
transformers.env.localModelPath = models;
console.log(await results(transformers, JSON.parse(readFileSync(0, "utf8"))));
