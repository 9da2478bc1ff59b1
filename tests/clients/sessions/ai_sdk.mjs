// Hold the conversation with the AI SDK, whose own loop runs the tool.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { address, declared, description, hold, model, people, requests, run, system } from "./common.mjs";

const provider = createOpenAICompatible({
  name: "specjax",
  baseURL: `${address}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const readNote = tool({
  description,
  inputSchema: z.object({ name: z.string().describe("The name of the note.") }),
  execute: (args) => run("read_note", args),
});
const tools = Object.fromEntries(
  declared.map(({ name, description, parameters }) => [
    name,
    tool({ description, inputSchema: jsonSchema(parameters), execute: (args) => run(name, args) }),
  ]),
);
if (!declared.length) tools.read_note = readNote;

async function chat(ask) {
  const messages = [];
  const answers = [];
  for (const request of requests) {
    messages.push({ role: "user", content: request });
    const fields = { model: provider(model), system, messages, tools, stopWhen: stepCountIs(4), maxRetries: 0 };
    const result = await ask(fields);
    answers.push(await result.text);
    messages.push(...(await result.response).messages);
  }
  return answers;
}

async function streamed(fields) {
  const result = streamText({
    ...fields,
    onError({ error }) {
      throw error;
    },
  });
  for await (const _ of result.textStream);
  return result;
}

async function typed(ask) {
  const output = Output.object({ schema: z.object({ name: z.string(), age: z.number() }) });
  const answers = [];
  for (const prompt of people) {
    const result = await ask({ model: provider(model), prompt, output, maxRetries: 0 });
    const { name, age } = await result.output;
    answers.push(`${name}, ${age}`);
  }
  return answers;
}

async function required(toolChoice) {
  const Person = tool({ inputSchema: z.object({ name: z.string(), age: z.number() }) });
  const answers = [];
  for (const prompt of people) {
    const fields = { model: provider(model), prompt, tools: { Person }, toolChoice, maxRetries: 0 };
    const { name, age } = (await generateText(fields)).toolCalls[0].input;
    answers.push(`${name}, ${age}`);
  }
  return answers;
}

await hold({
  generateText: () => chat(generateText),
  streamText: () => chat(streamed),
  people: () => typed(generateText),
  "people, streamed": () => typed(streamed),
  "people, a required tool": () => required("required"),
  "people, a named tool": () => required({ type: "tool", toolName: "Person" }),
});
