"""What the loopback Hub refuses in the front matter of a README: a part of the Hub's own rules."""

import re

import yaml

from tests.helpers.hub_request import json_answer, route

SDKS = ("gradio", "streamlit", "docker", "static")
COLORS = ("red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray")


@route("POST", "/api/validate-yaml")
def validate(hub, request):
    fields = request.json()
    errors, warnings = check_card(fields["content"], fields.get("repoType") or "model")
    answer = {"errors": [{"message": text} for text in errors], "warnings": [{"message": text} for text in warnings]}
    return json_answer(answer, 400 if errors else 200)


def front_matter(text):
    """The fields between the first two lines of `---`; None without them. yaml.YAMLError if they are broken."""
    found = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    return yaml.safe_load(found[1]) if found else None


def check_card(text, kind):
    """Errors and warnings."""
    try:
        fields = front_matter(text)
    except yaml.YAMLError as error:
        return [f"YAML error: {error}"], []
    if fields is None and kind == "space":
        return ["Missing configuration in README"], []
    if fields is None:
        return [], ["empty or missing yaml metadata in repo card"]
    if not isinstance(fields, dict):
        return ["metadata must be a mapping"], []
    errors = space_errors(fields) if kind == "space" else []
    for key in ("license", "library_name", "pipeline_tag"):
        types = (str, list) if key == "license" else str
        if not isinstance(fields.get(key, ""), types):
            errors.append(f'"{key}" must be a string')
    tags = fields.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        errors.append('"tags" must be an array of strings')
    return errors + result_errors(fields.get("model-index") or []), []


def space_errors(fields):
    errors = []
    if fields.get("sdk") not in SDKS:
        errors.append(f'"sdk" must be one of {SDKS}')
    for key in ("colorFrom", "colorTo"):
        if fields.get(key, "red") not in COLORS:
            errors.append(f'"{key}" must be one of {COLORS}')
    emoji = fields.get("emoji", "🏢")
    if not isinstance(emoji, str) or emoji.isascii():
        errors.append('"emoji" must be an emoji')
    if len(str(fields.get("short_description", ""))) > 60:
        errors.append('"short_description" length must be less than or equal to 60 characters long')
    return errors


def result_errors(models):
    errors = []
    for model in models:
        if "name" not in model:
            errors.append('"model-index[0].name" is required')
        for number, result in enumerate(model.get("results") or [{}]):
            for key in ("task", "dataset", "metrics"):
                if key not in result:
                    errors.append(f'"model-index[0].results[{number}].{key}" is required')
    return errors
