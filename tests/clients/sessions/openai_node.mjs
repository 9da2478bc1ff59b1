// Hold the conversation with OpenAI's client for node: its own loop of tools, and by responses.
import OpenAI from "openai";
import { address, description, hold, model, parameters, readNote, requests, system } from "./common.mjs";

const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
const tool = {
  type: "function",
  function: { name: "read_note", description, parameters, function: readNote, parse: JSON.parse },
};

async function chat(isStreamed) {
  let messages = [{ role: "system", content: system }];
  const answers = [];
  for (const request of requests) {
    messages.push({ role: "user", content: request });
    const runner = client.chat.completions.runTools({ model, messages, tools: [tool], stream: isStreamed });
    answers.push(await runner.finalContent());
    messages = [...runner.messages];
  }
  return answers;
}

async function responses(isStreamed) {
  const input = [];
  const answers = [];
  const tools = [{ type: "function", name: "read_note", description, parameters, strict: false }];
  for (const request of requests) {
    input.push({ role: "user", content: request });
    for (;;) {
      const body = { model, instructions: system, input, tools, store: false };
      const response = isStreamed
        ? await client.responses.stream(body).finalResponse()
        : await client.responses.create(body);
      input.push(...response.output);
      const calls = response.output.filter((item) => item.type === "function_call");
      if (!calls.length) {
        answers.push(response.output_text);
        break;
      }
      for (const call of calls) {
        const output = readNote(JSON.parse(call.arguments));
        input.push({ type: "function_call_output", call_id: call.call_id, output });
      }
    }
  }
  return answers;
}

await hold({
  chat: () => chat(false),
  "chat, streamed": () => chat(true),
  responses: () => responses(false),
  "responses, streamed": () => responses(true),
});
