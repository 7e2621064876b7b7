# SPDX-License-Identifier: Apache-2.0
from lab.pictures import STYLE, pyplot, styled, svg_of


def drawn():
    with styled():
        figure, axis = pyplot.subplots()
        axis.plot([1, 2, 3], label="x ")
        axis.legend()
        return svg_of(figure)


def test_the_same_numbers_give_the_same_bytes_without_spaces_at_line_ends():
    text = drawn()
    assert text == drawn()
    assert text.endswith("</svg>\n")
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_a_picture_leaves_no_figure_and_no_style_behind():
    before = {key: pyplot.rcParams[key] for key in STYLE}
    open_figures = pyplot.get_fignums()
    drawn()
    assert pyplot.get_fignums() == open_figures
    assert {key: pyplot.rcParams[key] for key in STYLE} == before
