"""A page tells the numbers that were measured."""

from __future__ import annotations

from benchmarks import delta_table, fleet, machines_table, numerics_table


def test_the_page_of_deltas_has_the_tables_of_the_committed_results():
    text = delta_table.PAGE.read_text()
    assert delta_table.page(text) == text


def test_the_page_of_bursts_has_the_numbers_of_the_committed_result():
    text = fleet.PAGE.read_text()
    assert fleet.page(text) == text


def test_the_guide_to_machines_has_the_numbers_of_the_committed_results():
    text = machines_table.PAGE.read_text()
    assert machines_table.page(text) == text


def test_the_page_of_numerics_has_the_tables_and_the_pictures_of_the_committed_results():
    text = numerics_table.PAGE.read_text()
    assert numerics_table.page(text) == text
    assert len(numerics_table.pictures()) == 3
    for name, picture in numerics_table.pictures().items():
        assert numerics_table.PAGE.with_name(name).read_text() == picture
        assert f"({name})" in text
