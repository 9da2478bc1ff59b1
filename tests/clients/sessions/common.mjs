// The conversation that every program holds, and its tools: common.py in JavaScript.
import { readFileSync } from "node:fs";

export const [address, model] = process.argv.slice(2);
const conversation = JSON.parse(readFileSync(new URL("conversation.json", import.meta.url)));
export const { system, requests, people, tools: declared } = conversation;
export const description = "Read the note with a name.";
const parameters = {
  type: "object",
  properties: { name: { type: "string", description: "The name of the note." } },
  required: ["name"],
};
export const functions = declared.length ? declared : [{ name: "read_note", description, parameters }];
let runs = [];

export function run(tool, args) {
  runs.push({ tool, arguments: args });
  const call = conversation.calls.find((call) => call.tool === tool && isEqual(call.arguments, args));
  return call?.result ?? "There is no such thing.";
}

function isEqual(one, two) {
  const sorted = (args) => JSON.stringify(Object.entries(args).sort());
  return sorted(one) === sorted(two);
}

export async function hold(conversations) {
  const report = {};
  for (const [title, conversation] of Object.entries(conversations)) {
    runs = [];
    try {
      const answers = await conversation();
      report[title] = { runs, answers };
    } catch (error) {
      console.error(error);
      report[title] = { runs, error: String(error).slice(0, 500) };
    }
  }
  console.log(JSON.stringify(report));
}
