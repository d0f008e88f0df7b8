# Common chores, one word each; all need uv alone.
RUN = uv run --group dev

.PHONY: lint format types tests ci everything site benchmarks constraints sbom
lint:  ## linter, formatter and import contracts, without changes
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) lint-imports

format:
	$(RUN) ruff check --fix
	$(RUN) ruff format

types:
	$(RUN) mypy

tests:
	$(RUN) pytest

ci:  ## what .ci/run tests: these and more
	$(RUN) pytest --ci

everything:
	$(RUN) pytest --everything

site:
	$(RUN) --group docs sphinx-build -W --keep-going -q -c docs . build/site

benchmarks:  ## Loopwright beside its peers, about 20 minutes
	$(RUN) python -m benchmarks.throughput

constraints:  ## the versions of today's green build, for `pip install -c constraints.txt`
	uv pip compile --upgrade --quiet --no-header --no-annotate --no-emit-index-url --universal --python-version 3.10 \
	  --group dev --group docs pyproject.toml --output-file constraints.txt

sbom:  ## what a plain install brings, in CycloneDX's format
	mkdir -p build && uv export -q --format cyclonedx1.5 --no-dev --output-file build/sbom.json
