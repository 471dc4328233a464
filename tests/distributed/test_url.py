"""Storage URLs: what they may be, and that no password is ever shown."""

from urllib.parse import quote

import pytest
from sqlalchemy import make_url

from autotune.distributed.url import StorageUrl, redacted
from ppas_core.errors import InvalidInput


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://ppas:s3cret@db:5432/studies",
        "postgres://ppas:s3/cr@et@db/studies",
        "mysql://ppas:s3cret@db/studies",
        "postgresql://ppas@db/studies?password=s3cret&sslmode=require",
    ],
)
def test_a_storage_shows_no_password_in_any_form(text: str) -> None:
    where = StorageUrl.parse(text)
    for shown in (str(where), repr(where), redacted(f"ppas worker --storage={text} x")):
        assert "s3" not in shown
        assert "et" not in shown.replace("***", "")
        assert "***" in shown


@pytest.mark.parametrize("password", ["s3/cr@t", "a?b#c", "p:q", "100%@x", "a%2@/x"])
def test_a_password_as_it_is_and_one_that_was_encoded_both_reach_the_database(password: str) -> None:
    for written in (password, quote(password, safe="")):
        found = make_url(StorageUrl.parse(f"mysql://ppas:{written}@db:3307/studies?charset=utf8mb4").full)
        assert (found.username, found.password, found.host, found.port) == ("ppas", password, "db", 3307)
        assert found.database == "studies"
        assert found.query == {"charset": "utf8mb4"}


@pytest.mark.parametrize(
    "rest", ["ppas@db/s?password=a@b", "ppas:x@db/s?application_name=a@b", "db/s", "ppas:a%40b@db/s"]
)
def test_a_url_that_is_one_is_left_as_it_is(rest: str) -> None:
    assert StorageUrl.parse(f"postgresql://{rest}").full == f"postgresql+psycopg://{rest}"


@pytest.mark.parametrize(
    "text", ["", "postgresql", "redis://host/0", "sqlite://", "sqlite:///", "grpc://host:port", "grpc://"]
)
def test_what_is_no_storage_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"allowed|sqlite:///FILE"):
        StorageUrl.parse(text)


def test_a_refused_storage_shows_no_password_either() -> None:
    with pytest.raises(InvalidInput) as caught:
        StorageUrl.parse("redis://user:s3cret@host/0")
    assert "s3cret" not in str(caught.value)


def test_a_proxy_without_a_port_is_asked_at_optunas_own() -> None:
    assert StorageUrl.parse("grpc://head").address() == ("head", 13000)
