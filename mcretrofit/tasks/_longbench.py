"""LongBench's English sets: their prompts, new tokens and metrics, as published (2308.14508)."""

from __future__ import annotations

from typing import NamedTuple


class Set(NamedTuple):
    """One data set: its prompt with {context} and {input}, new tokens, and its metric's name."""

    prompt: str
    max_new_tokens: int
    metric: str


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output "
    "any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based "
    "on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
_QASPER = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question "
    'cannot be answered based on the information in the article, write "unanswerable". If the '
    'question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any '
    "explanation.\n\n"
)

# the missing space of "asconcisely" is the published one
SETS = {
    "narrativeqa": Set(
        "You are given a story, which can be either a novel or a movie script, and a question. "
        "Answer the question asconcisely as you can, using a single phrase if possible. Do not "
        "provide any explanation.\n\nStory: {context}\n\nNow, answer the question based on the "
        "story asconcisely as you can, using a single phrase if possible. Do not provide any "
        "explanation.\n\nQuestion: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "qasper": Set(
        "You are given a scientific article and a question. Answer the question "
        f"{_QASPER}Article: {{context}}\n\n Answer the question based on the above article "
        f"{_QASPER}Question: {{input}}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "multifieldqa_en": Set(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
        "question based on the above text, only give me the answer and do not output any other "
        "words.\n\nQuestion: {input}\nAnswer:",
        64,
        "qa_f1",
    ),
    "hotpotqa": Set(_PASSAGES, 32, "qa_f1"),
    "2wikimqa": Set(_PASSAGES, 32, "qa_f1"),
    "musique": Set(_PASSAGES, 32, "qa_f1"),
    "gov_report": Set(
        "You are given a report by a government agency. Write a one-page summary of the report."
        "\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge",
    ),
    "qmsum": Set(
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the "
        "query based on the above meeting transcript in one or more sentences.\n\nQuery: {input}\n"
        "Answer:",
        512,
        "rouge",
    ),
    "multi_news": Set(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge",
    ),
    "trec": Set(
        "Please determine the type of the question below. Here are some examples of questions."
        "\n\n{context}\n{input}",
        64,
        "classification",
    ),
    "triviaqa": Set(
        "Answer the question based on the given passage. Only give me the answer and do not output "
        "any other words. The following are some examples.\n\n{context}\n\n{input}",
        32,
        "qa_f1",
    ),
    "samsum": Set(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "{context}\n\n{input}",
        128,
        "rouge",
    ),
    "passage_count": Set(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
        "Please carefully read these paragraphs and determine how many unique paragraphs there are "
        "after removing duplicates. In other words, how many non-repeating paragraphs are there in "
        "total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after removing "
        "duplicates. The output format should only contain the number, such as 1, 2, 3, and so on."
        "\n\nThe final answer is: ",
        32,
        "count",
    ),
    "passage_retrieval_en": Set(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
        "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}"
        "\n\nPlease enter the number of the paragraph that the abstract is from. The answer format "
        'must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        "retrieval",
    ),
    "lcc": Set(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, "code_sim"
    ),
    "repobench-p": Set(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        "code_sim",
    ),
}

# of their completions the first line alone counts
FIRST_LINE = ("trec", "triviaqa", "samsum")
