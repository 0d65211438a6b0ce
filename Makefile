# Two commands do everything, as root on a fresh Debian or Ubuntu: `make demo` and `make test`.
# Both install what they need and can be run again at once.

VENV := .venv
PYTHON := $(VENV)/bin/python

.PHONY: demo test long accuracy setup setup-tests clean

demo: setup
	$(PYTHON) scripts/demo.py

test: setup-tests
	$(PYTHON) -m pytest -m "not long"

long: setup-tests
	$(PYTHON) -m pytest -m long

# The verdict on each fault of a real job, ten times, and on ten healthy runs; goes on where it was interrupted.
accuracy: setup
	$(PYTHON) benchmarks/lab_faults.py -o .lab-faults

setup:
	scripts/setup.sh $(VENV)

setup-tests:
	scripts/setup.sh $(VENV) tests

clean:
	rm -rf $(VENV) .lab-faults .typecheck build *.egg-info
