# Sourced by test.sh: finds the browser for the tests of the report page.
# BROWSER is a program, "install" (install Debian's chromium if there is no browser; needs root), or 0 for none. In CI the
# default is "install".

_browsers="chromium chromium-browser google-chrome google-chrome-stable chrome microsoft-edge"

_first_browser() {
  local name
  for name in $_browsers; do
    command -v "$name" && return 0
  done
  return 1
}

# find_browser: prints the program, or fails with the reason on standard error.
find_browser() {
  local choice="${BROWSER:-$([ "${CI:-}" = true ] && echo install || true)}"
  case "$choice" in
    0) echo "BROWSER=0" >&2; return 1 ;;
    "" | install) ;;
    *) command -v "$choice" || { echo "BROWSER=$choice: no such program" >&2; return 1; }; return 0 ;;
  esac
  _first_browser && return 0
  if [ "$choice" = install ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing chromium for the tests of the report's page" >&2
    if apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >&2; then
      _first_browser && return 0
    fi
    echo "chromium could not be installed" >&2
    return 1
  fi
  echo "none of $_browsers is on PATH, and BROWSER is not set (BROWSER=install installs Debian's)" >&2
  return 1
}
