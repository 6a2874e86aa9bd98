// @ts-check
// Server-sent events of a stream of bytes, as JSON. No access to the page.

const MOST_LINE = 1 << 20;

/**
 * What comes after "data:", until "[DONE]". A piece may end anywhere, also within a letter.
 * @param {AsyncIterable<Uint8Array> | ReadableStream<Uint8Array>} stream
 */
export async function* events(stream) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const piece of pieces(stream)) {
    rest += decoder.decode(piece, { stream: true });
    const lines = rest.split(/\r?\n/);
    rest = lines.pop() ?? "";
    if (rest.length > MOST_LINE) throw new Error("The answer has a line that does not end.");
    for (const line of lines) {
      const text = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (text === "[DONE]") return;
      if (text) yield parsed(text);
    }
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error("The answer is not what a model's stream looks like.");
  }
}

/** A stream's pieces, in browsers that cannot iterate over it as well. */
async function* pieces(stream) {
  if (!("getReader" in stream)) {
    yield* stream;
    return;
  }
  const reader = stream.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
