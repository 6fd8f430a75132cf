"""Build the search example's task from a seed: a corpus of random facts, questions about them, a small random model.

Writes, under ``--out``::

    model/              config.json, model.safetensors, tokenizer files (random weights)
    corpus.jsonl        one document per person, with a random fact
    data/train.parquet  questions about some of the people  (verl's RLHF schema)
    data/test.parquet   questions about the others
    data/sft.parquet    a few kinds of demonstrations for the supervised warm-up

Most demonstrations guess, some search, some forget the search tag. After the warm-up, the policy knows the format but
seldom searches. Reinforcement learning then discovers that searching pays.

Nothing is downloaded; the same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from make_arithmetic import build_model, build_tokenizer, write_parquet

DATA_SOURCE = "facts"
TAGS = [f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")]


def words(text: str) -> list[str]:
    """Split a line into words."""
    return text.split()


FIRST = words("Ada Bo Cleo Dan Eve Finn Gus Hal Ida Jon Kit Lea Max Nora Otto Pia Quin Rosa Sam Tess Uma Vic Wes Zoe")
LAST = words(
    "Ames Bell Cole Dorn Ek Frey Gale Hale Ives Jung Kerr Lund Moss Nash Ober Pike Reed Shaw Toll Urry Vane Wolf"
)
FACTS = {
    "colour": words("red blue green teal pink gold grey black white brown violet orange"),
    "city": words("Oslo Rome Lima Cairo Paris Tokyo Delhi Quito Accra Perth Turin Lyon"),
    "pet": words("cat dog owl fox hen goat frog mouse duck horse crab swan"),
}
OTHER_WORDS = words("is the of The I must look it up know")
# Percentages of demonstrations that search, and that forget the search tag.
SEARCHES, FORGETS_THE_TAG = 14, 16


def task_tokenizer() -> object:
    """Return a tokenizer in which every word and tag of the task is one token."""
    vocabulary = ["What", "Doc", "Title", *(f"Ġ{word}" for word in (*FIRST, *LAST, *OTHER_WORDS, *FACTS))]
    vocabulary += [f"Ġ{value}" for values in FACTS.values() for value in values]
    return build_tokenizer(list(dict.fromkeys(vocabulary)), TAGS)


def build_people(rng: random.Random) -> list[dict]:
    """Return all people with one fact each, shuffled."""
    people = []
    for name in (f"{first} {last}" for first in FIRST for last in LAST):
        kind = rng.choice(list(FACTS))
        people.append({"name": name, "kind": kind, "value": rng.choice(FACTS[kind])})
    rng.shuffle(people)
    return people


def document(person: dict, number: int) -> dict:
    """Return the corpus document of a person."""
    fact = f"The {person['kind']} of {person['name']} is {person['value']}."
    return {"id": str(number), "contents": f"{person['name']}\n{fact}"}


def question_row(person: dict, split: str, index: int) -> dict:
    """Return one question in verl's RLHF schema."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"What is the {person['kind']} of {person['name']}?"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [person["value"]]}},
        "extra_info": {"split": split, "index": index},
    }


def demonstration(person: dict, rng: random.Random) -> list[dict]:
    """Return one demonstration of a question; search results are context and are not trained on."""
    draw = rng.randrange(100)
    thought = "<think> I must look it up.</think>"
    if draw < SEARCHES:
        _, _, fact = document(person, 0)["contents"].partition("\n")
        result = f"\n\n<information>Doc 1(Title: {person['name']}) {fact}</information>\n\n"
        turn, answer = f"{thought}<search> {person['name']}</search>", f"<answer> {person['value']}</answer>"
        return [message("assistant", turn), message("environment", result), message("assistant", answer)]
    if draw < SEARCHES + FORGETS_THE_TAG:
        return [message("assistant", f"{thought} {person['name']}")]
    guess = rng.choice(FACTS[person["kind"]])
    return [message("assistant", f"<think> I know it.</think><answer> {guess}</answer>")]


def message(role: str, content: str) -> dict:
    """Return one message of a response."""
    return {"role": role, "content": content}


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/search_agent/task"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-test", type=int, default=128, help="people with held-out questions only")
    parser.add_argument("--demonstrations", type=int, default=180 * 128)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    tokenizer = task_tokenizer()
    model = build_model(tokenizer, args.seed, args.hidden, args.layers)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")
    people = build_people(rng)
    documents = [json.dumps(document(person, number)) for number, person in enumerate(people)]
    (args.out / "corpus.jsonl").write_text("\n".join(documents) + "\n", encoding="utf-8")
    test, train = people[: args.num_test], people[args.num_test :]
    for split, members in (("train", train), ("test", test)):
        rows = [question_row(person, split, index) for index, person in enumerate(members)]
        write_parquet(rows, args.out / "data" / f"{split}.parquet", with_response=False)
    people_asked = [rng.choice(train) for _ in range(args.demonstrations)]
    rows = [
        {**question_row(person, "sft", i), "response": demonstration(person, rng)}
        for i, person in enumerate(people_asked)
    ]
    write_parquet(rows, args.out / "data" / "sft.parquet", with_response=True)
    facts = {"documents": len(documents), "train": len(train), "test": len(test), "demonstrations": len(rows)}
    print(json.dumps({"out": str(args.out), "parameters": sum(p.numel() for p in model.parameters()), **facts}))


if __name__ == "__main__":
    main()
