"""Fencepost reads properties files as Java does, and refuses data directories of Apache Kafka."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fencepost.coordinator.config import properties
from tests.support.cluster import Cluster, unique
from tests.support.kafka import Kafka, java_command, required

FILES = 300
ALPHABET = "ab  \t\f=:#!\\\\\\\n\n\r\\u00e9\\ud83d\\ude00\\n\\t\\qü"
"""All characters that have a meaning in a properties file, and some other characters."""

READER = """
import java.nio.file.*;
import java.util.*;
public class Read {
  static String hex(String s) {
    StringBuilder b = new StringBuilder();
    for (char c : s.toCharArray()) b.append(String.format("%04x", (int) c));
    return b.toString();
  }
  public static void main(String[] names) throws Exception {
    for (String name : names) {
      Properties p = new Properties();
      try (var in = Files.newInputStream(Path.of(name))) { p.load(in); }
      catch (IllegalArgumentException e) { System.out.println("refused"); continue; }
      List<String> rows = new ArrayList<>();
      for (String k : p.stringPropertyNames()) rows.add(hex(k) + "=" + hex(p.getProperty(k)));
      Collections.sort(rows);
      System.out.println(String.join(" ", rows));
    }
  }
}
"""


def run_source(home: Path, name: str, source: str, *arguments: str) -> list[str]:
    """Compile and run one Java file; return the lines that it prints."""
    path = home / f"{name}.java"
    path.write_text(source)
    with required():
        command = java_command(str(path), *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return done.stdout.splitlines()


def told_by_java(line: str) -> dict[str, str] | None:
    """Return the properties in a line of :data:`READER`'s output, None if Java refused the file.

    Lone surrogates, which are no characters, are replaced. Java makes an empty key of a backslash
    at the very end of a file; it is dropped, because no setting has an empty key.
    """
    if line == "refused":
        return None
    pairs = (pair.split("=") for pair in line.split())
    return said({text(key): text(value) for key, value in pairs})


def said(found: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in found.items() if key}


def text(digits: str) -> str:
    return bytes.fromhex(digits).decode("utf-16-be", "replace")


def told_by_us(raw: bytes) -> dict[str, str] | None:
    try:
        return said(properties.parse(raw))
    except ValueError:
        return None


@pytest.mark.parametrize("seed", range(3))
def test_properties_are_read_as_java_does(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    paths = []
    for number in range(FILES):
        pieces = draw.choices([*ALPHABET, "\\u00e9", "\\uD83D\\uDE00", "\\u12", "\\\n"], k=25)
        paths.append(tmp_path / str(number))
        paths[-1].write_bytes("".join(pieces).encode("latin-1"))
    told = run_source(tmp_path, "Read", READER, *map(str, paths))
    assert len(told) == FILES
    for path, line in zip(paths, told, strict=True):
        assert told_by_us(path.read_bytes()) == told_by_java(line), path.read_bytes()
    assert 0 < told.count("refused") < FILES


def test_data_directory_of_apache_kafka_is_refused(kafka: Kafka, tmp_path: Path) -> None:
    """A file of Apache Kafka identifies the directory, whose unknown folders must not be moved."""
    with Cluster(kafka.bootstrap) as cluster:
        cluster.create_topic(unique("theirs"))
    data = shutil.copytree(kafka.data_dir, tmp_path / "data")
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    listening = "PLAINTEXT://127.0.0.1:0,CONTROLLER://127.0.0.1:0"
    path = tmp_path / "server.properties"
    path.write_text(
        f"log.dirs={data}\nlisteners={listening}\ncontroller.listener.names=CONTROLLER\n"
    )
    command = [sys.executable, "-m", "fencepost", "serve", "--config-file", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "belongs to Apache Kafka" in done.stderr
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == before
