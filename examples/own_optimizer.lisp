;;; A file that defines its own optimizer, AdaBelief (Zhuang et al. 2020), and its own syntax.
;;; Shows `defoptimizer` with its slots, and macros: `squared` evaluates its form once under a name of `gensym` that no
;;; other code can have, and `chain` passes a value through calls in the order in which they are read.
;;;
;;;     sexpgpu run examples/own_optimizer.lisp
(import "nn" "loss" "schedule")

(defknob hidden 128 "units of the hidden layer" :min 1)
(defknob lr 2e-3 "peak learning rate")
(defknob batch 64 "samples in a step")
(defknob steps 500 "steps of the run")
(defknob seed 1 "seed of the run")

(defmacro squared (form)
  (let ((value (gensym)))
    `(let ((,value ,form)) (* ,value ,value))))

;; (chain x (linear 10) relu) is (relu (linear x 10)).
(defmacro chain (value &rest calls)
  (reduce (lambda (done call)
            (if (listp call) `(,(first call) ,done ,@(rest call)) `(,call ,done)))
          calls :initial-value value))

;; (blend old new :keep 0.9) is 0.9 old + 0.1 new, with one evaluation of each.
(defmacro blend (old new &key keep)
  (let ((share (gensym)))
    `(let ((,share ,keep)) (+ (* ,share ,old) (* (- 1 ,share) ,new)))))

;; As Adam, but a gradient is measured by its distance to the running mean: the step is long where gradients are as believed.
(defoptimizer adabelief (param grad &key (lr 1e-3) (betas [0.9 0.999]) (eps 1e-8) (weight-decay 0))
  :state ((m zeros) (s zeros))
  "Adam that divides by the deviation of the gradient from its running mean, with decoupled weight decay."
  (destructuring-bind (b1 b2) betas
    (let* ((t (cast (+ (step) 1) f32))
           (m (blend m grad :keep b1))
           (s (+ eps (blend s (squared (- grad m)) :keep b2)))
           (direction (/ (/ m (- 1 (power b1 t)))
                         (+ eps (sqrt (/ s (- 1 (power b2 t))))))))
      (list (- (* (- 1 (* lr weight-decay)) param) (* lr direction))
            m s))))

(defdata digits
  (csv "data/digits.csv.gz"
       :fields ((image f32 [64] :scale 1/16)
                (label i32)))
  :split ((train 4/5) (valid 1/5)))

(deflayer perceptron (image)
  (chain image
    (linear hidden :name "in")
    relu
    (linear 10 :name "out")))

(defun digit-loss (image label)
  (cross-entropy (perceptron image) label))

(defun digit-accuracy (image label)
  (accuracy (perceptron image) label))

(defrun train
  :data (batches digits :split train :batch batch :shuffle true)
  :loss digit-loss
  :optimizer (adabelief :lr (cosine-decay :peak lr :steps steps) :weight-decay 1e-2)
  :steps steps
  :seed seed
  :checkpoint-every 100)

(defeval valid
  :data (batches digits :split valid :batch 128)
  :every 50
  :metrics ((loss digit-loss) (accuracy digit-accuracy)))
