// Sends the page's questions to the server. On a page without a server, browser.js takes the place of this file.

// `name` is one of questions.Questions.NAMES.
export async function ask(name, question) {
  const headers = { "Content-Type": "application/json" }, body = JSON.stringify(question);
  const answered = await fetch(`/ask/${name}`, { method: "POST", headers, body }).catch(() => null);
  const answer = await answered?.json().catch(() => null); // null if the server failed or was stopped
  if (!answer)
    throw new Error("The explorer does not answer. If it was stopped, start it again. Otherwise its terminal shows the error.");
  if (answer.error) throw new Error(answer.error);
  return answer;
}
