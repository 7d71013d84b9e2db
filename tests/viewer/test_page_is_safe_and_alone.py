"""The page loads nothing, and no text of a row becomes markup."""

import http.client
import re
import threading

import numpy as np
import pytest

from tree_rl.inspection.files import InputError
from tree_rl.inspection.row import Row
from tree_rl.viewer.page import LIBRARY, STATIC, view_data, write_page
from tree_rl.viewer.roles import RoleReader
from tree_rl.viewer.server import PageServer

HOSTILE = "</script><script>hacked=1</script><img src=x onerror=hacked=1>{{data}}"


def page_named(name: str) -> bytes:
    row = Row(name=name, group=name, token_ids=np.array([1, 2]), trained=None)
    return write_page(view_data([row], RoleReader(None), source=name))


def test_hostile_names_leave_the_markup_as_it_is_which_names_no_address_to_load() -> None:
    page, plain = page_named(HOSTILE).decode(), page_named("x").decode()
    assert page.count("<script") == plain.count("<script") == 3
    assert "<img" not in page and page_named("x").decode() == plain
    loads = r"""(src|href|action)\s*=\s*["']?\s*(https?:|//)|url\(|@import|\bfetch\(|XMLHttpRequest"""
    assert not re.search(loads, plain) and "default-src 'none'" in plain
    # Namespaces of XML and the library's own notices load nothing.
    assert set(re.findall(r"https?://([\w.]+)", plain)) <= {"www.w3.org", "d3js.org"}


def test_library_stands_with_version_and_licence() -> None:
    versions = (STATIC / "d3/README.md").read_text()
    licence = (STATIC / "d3/LICENSE.txt").read_text()
    for name in LIBRARY:
        head = (STATIC / f"d3/d3-{name}.min.js").read_text().splitlines()[0]
        found = re.search(rf"d3-{name}/ v([\d.]+) Copyright", head)
        assert found is not None and f"| d3-{name} | {found[1]} |" in versions
        assert f"d3-{name}\n\nCopyright" in licence


def test_server_answers_its_own_names_only() -> None:
    asked = (("/", None, 200), ("/other", None, 404), ("/../etc/passwd", None, 404), ("/", "evil.example", 403))
    with PageServer(b"page", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert server.server_address[0] == "127.0.0.1"
            for path, host, status in asked:
                client = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
                client.request("GET", path, headers={} if host is None else {"Host": host})
                answer = client.getresponse()
                assert answer.status == status
                assert (answer.read() == b"page") is (status == 200)
                client.close()
            with pytest.raises(InputError, match=f"--port {server.server_port}: expected a free port"):
                PageServer(b"page", server.server_port)
        finally:
            server.shutdown()
            thread.join()
