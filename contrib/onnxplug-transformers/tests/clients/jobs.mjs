// What tests ask of transformers.js, in Node and in a browser.

function argument(value, { RawImage }) {
  if (value?.image) return new RawImage(Uint8ClampedArray.from(value.image.flat(2)), value.image[0].length, value.image.length, 3);
  if (value?.sound) return Float32Array.from(value.sound);
  return value;
}

async function generated(transformers, { generate, model, options, args: [inputs] }) {
  const loaded = await transformers[generate].from_pretrained(model, options);
  const tensors = Object.entries(inputs).map(([name, { type, data, dims }]) => [
    name,
    dims ? new transformers.Tensor(type, type === "int64" ? data.map(BigInt) : data, dims) : data,
  ]);
  return loaded.generate(Object.fromEntries(tensors));
}

async function piped(transformers, { task, model, options, args }) {
  const run = await transformers.pipeline(task, model, options);
  return run(...args.map((value) => argument(value, transformers)));
}

/** The results of jobs as JSON, each a pipeline's task, or a class that generates, with model, options and arguments. */
export async function results(transformers, jobs) {
  const found = [];
  for (const job of jobs) {
    const value = await (job.generate ? generated : piped)(transformers, job);
    found.push(value instanceof transformers.Tensor ? value.tolist() : value);
  }
  return JSON.stringify(found, (_, value) => (typeof value === "bigint" ? Number(value) : value));
}
