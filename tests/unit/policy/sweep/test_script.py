"""Modules as one script: in order, with names of their own, and refused where their form is not known."""

from __future__ import annotations

import pytest

from ugro.web.report import bundle

MODULES = {
    "/a.js": 'import { twice } from "/b.js";\nimport "/c.js";\n// a comment\nconst SIZE = 2;\nshow(twice(SIZE));\n',
    "/b.js": 'import { SIZE } from "/c.js";\nexport function twice(one) { return 2 * one * SIZE; }\n',
    "/c.js": "export const SIZE = 3;\nexport class Way {}\n",
}


def test_a_module_comes_after_what_it_imports_and_only_once() -> None:
    text = bundle("/a.js", MODULES)
    assert text.count("class Way") == 1
    assert text.index("class Way") < text.index("function twice") < text.index("show(")
    assert "const { twice } = module1;" in text
    assert "return { SIZE, Way };" in text
    assert "comment" not in text
    assert "import" not in text
    assert "export" not in text


@pytest.mark.parametrize("line", ['import all from "/c.js";', "export default 3;", 'export * from "/c.js";'])
def test_another_form_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="not known"):
        bundle("/a.js", {"/a.js": f"{line}\n", "/c.js": ""})


def test_a_circle_is_an_error() -> None:
    with pytest.raises(ValueError, match="imports itself"):
        bundle("/a.js", {"/a.js": 'import "/b.js";\n', "/b.js": 'import "/a.js";\n'})


def test_a_script_cannot_end_its_own_tag() -> None:
    assert "</script" not in bundle("/a.js", {"/a.js": 'const text = "</script>";\n'})
