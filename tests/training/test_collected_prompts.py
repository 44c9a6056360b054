"""Prompts of `saltus collect text`: of conversations with answers the questions are taken."""

from test_cli import lines

from saltus.cli.collection import read_inputs

QUESTION, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}


def test_the_last_answer_of_a_conversation_is_left_out_with_a_note(tmp_path, capsys):
    """The model would go on after it: a text that is nearly always empty."""
    conversations = [QUESTION, ANSWER], [QUESTION, ANSWER, QUESTION], [ANSWER]
    file = lines(tmp_path / "talk.jsonl", *({"messages": messages} for messages in conversations))
    asked = [list(prompt.messages) for prompt in read_inputs(file, None)]
    assert asked == [[QUESTION], [QUESTION, ANSWER, QUESTION], [ANSWER]]
    assert capsys.readouterr().err.startswith("conversations that end with an answer: 1; the model writes its own")


def test_prompts_without_answers_have_no_note(tmp_path, capsys):
    file = lines(tmp_path / "prompts.jsonl", {"prompt": "Who?"}, {"messages": [QUESTION]})
    assert len(read_inputs(file, None)) == 2
    assert capsys.readouterr().err == ""
