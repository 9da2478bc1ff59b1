// Hold the conversation with OpenAI's client for node: its own loop of tools, and by responses.
import OpenAI from "openai";
import { address, functions, hold, model, people, requests, run, system } from "./common.mjs";

const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
const tools = functions.map((declared) => ({
  type: "function",
  function: { ...declared, function: (args) => run(declared.name, args), parse: JSON.parse },
}));

async function chat(isStreamed) {
  let messages = [{ role: "system", content: system }];
  const answers = [];
  for (const request of requests) {
    messages.push({ role: "user", content: request });
    const runner = client.chat.completions.runTools({ model, messages, tools, stream: isStreamed });
    answers.push(await runner.finalContent());
    messages = [...runner.messages];
  }
  return answers;
}

async function responses(isStreamed) {
  const input = [];
  const answers = [];
  const tools = functions.map((declared) => ({ type: "function", ...declared, strict: false }));
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
        const output = run(call.name, JSON.parse(call.arguments));
        input.push({ type: "function_call_output", call_id: call.call_id, output });
      }
    }
  }
  return answers;
}

async function required(choice) {
  const properties = { name: { type: "string" }, age: { type: "integer" } };
  const parameters = { type: "object", properties, required: ["name", "age"], additionalProperties: false };
  const tools = [{ type: "function", function: { name: "Person", parameters, strict: true } }];
  const answers = [];
  for (const content of people) {
    const body = { model, messages: [{ role: "user", content }], tools, tool_choice: choice };
    const completion = await client.chat.completions.create(body);
    const { name, age } = JSON.parse(completion.choices[0].message.tool_calls[0].function.arguments);
    answers.push(`${name}, ${age}`);
  }
  return answers;
}

await hold({
  chat: () => chat(false),
  "chat, streamed": () => chat(true),
  responses: () => responses(false),
  "responses, streamed": () => responses(true),
  "people, a required tool": () => required("required"),
  "people, a named tool": () => required({ type: "function", function: { name: "Person" } }),
});
