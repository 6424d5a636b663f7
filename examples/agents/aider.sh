#!/bin/sh
# Runs aider, which edits files in its working directory: fetches the machine's files before, and returns what it changed.
set -eu
etude-machine -c 'find . -type f -not -path "*/.*"' | while read -r file; do
  mkdir -p "$(dirname "$file")"
  etude-machine --read "$file" >"$file"
done
touch .began
"$@" $(find . -type f -not -path '*/.*')
find . -type f -newer .began -not -path '*/.*' | while read -r file; do
  etude-machine --write "$file" <"$file"
done
