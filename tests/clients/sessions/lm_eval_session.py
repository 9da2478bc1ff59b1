"""Let lm_eval ask questions, each after examples that are earlier turns of a chat."""

import json
from pathlib import Path

from common import ADDRESS, MODEL, hold, say
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

WORDS = ["Good morning", "Good evening", "Good night"]
TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {train: FOLDER/words.jsonl, test: FOLDER/words.jsonl}}
training_split: train
test_split: test
output_type: generate_until
doc_to_text: "{{request}}"
doc_to_target: "{{word}}"
fewshot_config: {sampler: first_n}
generation_kwargs: {until: ["END"], max_gen_toks: 256, temperature: 0.0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
metadata: {version: 1.0}
"""


def ask(concurrent: int) -> list[str]:
    """Return the answers to the questions, some of which are asked at a time."""
    folder = Path.cwd()
    rows = [{"request": say(word), "word": word} for word in WORDS]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "words.yaml").write_text(TASK.replace("FOLDER", str(folder)))
    evaluation = simple_evaluate(
        model="local-chat-completions",
        model_args={
            "model": MODEL,
            "base_url": f"{ADDRESS}/v1/chat/completions",
            "num_concurrent": concurrent,
        },
        tasks=["words"],
        num_fewshot=2,
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    return [sample["filtered_resps"][0] for sample in evaluation["samples"]["words"]]


hold({"words, one at a time": lambda: ask(1), "words, three at a time": lambda: ask(3)})
