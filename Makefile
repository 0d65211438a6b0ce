# Two commands do everything, as root on a fresh Debian or Ubuntu: `make demo` and `make test`.
# Both install what they need and can be run again at once.

VENV := .venv
PYTHON := $(VENV)/bin/python

.PHONY: demo test long accuracy man setup setup-tests clean

demo: setup
	$(PYTHON) scripts/demo.py

test: setup-tests
	$(PYTHON) -m pytest -n auto --dist loadgroup -m "not long"

long: setup-tests
	$(PYTHON) -m pytest -m long

# The verdict on each fault of a real job, ten times, and on ten healthy runs; goes on where it was interrupted.
accuracy: setup
	$(PYTHON) benchmarks/lab_faults.py -o .lab-faults

# The manual page pulse(8) and completions of bash and zsh, from the command line's own definition, below PREFIX/share.
PREFIX := build
man: setup
	$(PYTHON) scripts/manual.py $(PREFIX)

setup:
	scripts/setup.sh $(VENV)

setup-tests:
	scripts/setup.sh $(VENV) tests

clean:
	rm -rf $(VENV) .lab-faults .typecheck build *.egg-info
